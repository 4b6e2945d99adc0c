"""A sample as a person reads it: spans of text, which of them count, and where documents begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shoal.data.packing import Rows, Statistics
from shoal.data.store import TokenStore
from shoal.data.tokenize import load_tokenizer


@dataclass(frozen=True)
class Span:
    """Consecutive ``tokens`` of one document that all count, or all do not; ``opens`` where it begins the document."""

    text: str
    tokens: int
    counts: bool
    opens: bool


@dataclass(frozen=True)
class Shown:
    """A sample of a run, or a document of a store, by its ``number``.

    ``padded`` tokens lie behind the last span; ``left`` more tokens of a long document are not shown.
    """

    number: int
    store: Path
    spans: tuple[Span, ...]
    padded: int = 0
    left: int = 0


@dataclass(frozen=True)
class Part:
    """A store of a run: its share of the samples, and what packing makes of it."""

    path: Path
    share: float
    packing: Statistics

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {"path": str(self.path), "share": self.share, **asdict(self.packing)}


@dataclass(frozen=True)
class Look:
    """``samples`` as text; of a run, the ``step`` that reads them and the ``parts`` that its samples come from."""

    samples: tuple[Shown, ...]
    step: int | None = None
    parts: tuple[Part, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "step": self.step,
            "sources": [part.as_json() for part in self.parts],
            "samples": [
                {
                    "number": one.number,
                    "store": str(one.store),
                    "padded": one.padded,
                    "left": one.left,
                    "spans": [asdict(span) for span in one.spans],
                }
                for one in self.samples
            ],
        }  # fmt: skip


class Reader:
    """Turns tokens of a store into text; where the store keeps no tokenizer, into their numbers."""

    def __init__(self, store: TokenStore) -> None:
        self._store = store
        path = store.tokenizer_path
        self._tokenizer: Tokenizer | None = load_tokenizer(path) if path is not None else None

    def sample(self, number: int, rows: Rows, row: int) -> Shown:
        """One of some samples. Its first token is read and never predicted, so that it does not count."""
        filled = int(rows.filled[row])
        counts = rows.counts[row, :filled].copy()
        counts[:1] = False
        spans = self._spans(rows.tokens[row, :filled], counts, rows.opens[row, :filled])
        return Shown(number, self._store.path, tuple(spans), padded=rows.tokens.shape[1] - filled)

    def document(self, number: int, limit: int) -> Shown:
        """A document of the store, its first ``limit`` tokens."""
        start, end = self._store.documents[number : number + 2].tolist()
        shown = slice(start, min(end, start + limit))
        tokens = self._store.tokens[shown].astype(np.int64)
        counts = np.ones(len(tokens), bool) if self._store.counts is None else self._store.counts[shown].astype(bool)
        opens = np.arange(len(tokens)) == 0
        spans = self._spans(tokens, counts, opens)
        return Shown(number, self._store.path, tuple(spans), left=end - start - len(tokens))

    def _spans(self, tokens: NDArray[np.int64], counts: NDArray[np.bool_], opens: NDArray[np.bool_]) -> Iterator[Span]:
        begins = np.flatnonzero(opens[1:] | (counts[1:] != counts[:-1])) + 1
        bounds = [0, *begins.tolist(), len(tokens)]
        for start, end in pairwise(bounds):
            if start < end:
                yield Span(self._text(tokens[start:end].tolist()), end - start, bool(counts[start]), bool(opens[start]))

    def _text(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        text: Any = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return str(text)
