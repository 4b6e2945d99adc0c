"""Words and bytes that this rank received, by collective, mesh axis and what they were for.

Ring convention, as the literature counts volume: with p ranks and n words in the full (gathered or unreduced)
tensor, a rank receives (p−1)/p·n words in an all-gather or a reduce-scatter, twice that in an all-reduce, and n in a
broadcast unless it is the root (averaged over the ranks: (p−1)/p·n). In a reduce to a root, p−1 terms of n words are
received between all of them, by the root or on the way there: (p−1)/p·n again. A message from rank to rank counts where
it is received.

A word is an element, of whatever dtype; a byte of what goes as int8 blocks, whose purpose says so.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

FACTOR = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1, "reduce": 1}

MESSAGE = "message"
"""What is sent to one rank."""


class Entry(NamedTuple):
    """All of one collective over one axis for one purpose."""

    collective: str
    axis: str
    purpose: str
    calls: int
    words: float
    bytes: float


class Ledger:
    """Counts words received, keyed by (axis, purpose)."""

    def __init__(self) -> None:
        self._words: Counter[tuple[str, str, str]] = Counter()
        self._bytes: Counter[tuple[str, str, str]] = Counter()
        self._calls: Counter[tuple[str, str, str]] = Counter()

    def record(self, collective: str, words: int, ranks: int, axis: str, purpose: str, itemsize: int) -> None:
        """Enter one collective over ``ranks`` ranks whose full tensor has ``words`` elements of ``itemsize`` bytes."""
        self._enter((collective, axis, purpose), FACTOR[collective] * (ranks - 1) * words / ranks, itemsize)

    def receive(self, words: int, axis: str, purpose: str, itemsize: int, collective: str = MESSAGE) -> None:
        """Enter ``words`` elements of ``itemsize`` bytes that other ranks send to this one."""
        self._enter((collective, axis, purpose), words, itemsize)

    def _enter(self, key: tuple[str, str, str], words: float, itemsize: int) -> None:
        self._words[key] += words  # type: ignore[assignment]
        self._bytes[key] += words * itemsize  # type: ignore[assignment]
        self._calls[key] += 1

    def words(self, axis: str | None = None, purpose: str | None = None) -> float:
        """Words received so far, over all axes and purposes or those named."""
        return float(sum(n for key, n in self._words.items() if _matches(key, axis, purpose)))

    def calls(self, axis: str | None = None, purpose: str | None = None) -> int:
        """Collectives and messages so far, over all axes and purposes or those named."""
        return sum(n for key, n in self._calls.items() if _matches(key, axis, purpose))

    def table(self) -> dict[str, float]:
        """Words by ``"axis/purpose"``, sorted, for a report or a log line."""
        found: Counter[str] = Counter()
        for (_, axis, purpose), words in sorted(self._words.items()):
            found[f"{axis}/{purpose}"] += words
        return {key: float(words) for key, words in sorted(found.items())}

    def entries(self) -> list[Entry]:
        """Everything, sorted by collective, axis and purpose."""
        return [
            Entry(*key, n, float(self._words[key]), float(self._bytes[key])) for key, n in sorted(self._calls.items())
        ]

    def clear(self) -> None:
        """Start counting from zero."""
        self._words.clear()
        self._bytes.clear()
        self._calls.clear()


def _matches(key: tuple[str, str, str], axis: str | None, purpose: str | None) -> bool:
    return axis in (None, key[1]) and purpose in (None, key[2])
