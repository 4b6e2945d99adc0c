"""Words that this rank received, by mesh axis and by what they were for.

Ring convention, as the literature counts volume: with p ranks and n words in the full (gathered or unreduced)
tensor, a rank receives (p−1)/p·n words in an all-gather or a reduce-scatter, twice that in an all-reduce, and n in a
broadcast unless it is the root (averaged over the ranks: (p−1)/p·n). In a reduce to a root, p−1 terms of n words are
received between all of them, by the root or on the way there: (p−1)/p·n again. A message from rank to rank counts where
it is received.

A word is an element, of whatever dtype; a byte of what goes as int8 blocks, whose purpose says so.
"""

from __future__ import annotations

from collections import Counter

FACTOR = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1, "reduce": 1}


class Ledger:
    """Counts words received, keyed by (axis, purpose)."""

    def __init__(self) -> None:
        self._words: Counter[tuple[str, str]] = Counter()
        self._calls: Counter[tuple[str, str]] = Counter()

    def record(self, collective: str, words: int, ranks: int, axis: str, purpose: str) -> None:
        """Enter one collective over ``ranks`` ranks whose full tensor has ``words`` elements."""
        self._words[axis, purpose] += FACTOR[collective] * (ranks - 1) * words / ranks  # type: ignore[assignment]
        self._calls[axis, purpose] += 1

    def receive(self, words: int, axis: str, purpose: str) -> None:
        """Enter one message of ``words`` elements that another rank sends to this one."""
        self._words[axis, purpose] += words
        self._calls[axis, purpose] += 1

    def words(self, axis: str | None = None, purpose: str | None = None) -> float:
        """Words received so far, over all axes and purposes or those named."""
        return float(sum(n for key, n in self._words.items() if _matches(key, axis, purpose)))

    def calls(self, axis: str | None = None, purpose: str | None = None) -> int:
        """Collectives and messages so far, over all axes and purposes or those named."""
        return sum(n for key, n in self._calls.items() if _matches(key, axis, purpose))

    def table(self) -> dict[str, float]:
        """Words by ``"axis/purpose"``, sorted, for a report or a log line."""
        return {f"{axis}/{purpose}": float(n) for (axis, purpose), n in sorted(self._words.items())}

    def clear(self) -> None:
        """Start counting from zero."""
        self._words.clear()
        self._calls.clear()


def _matches(key: tuple[str, str], axis: str | None, purpose: str | None) -> bool:
    return axis in (None, key[0]) and purpose in (None, key[1])
