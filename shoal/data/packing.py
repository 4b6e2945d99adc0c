"""How the documents of a store become samples of one length.

Shapes: T = ``seq_len``. A sample covers T + 1 tokens: T that are read, and for each the one that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.data.bestfit import best_fit
from shoal.data.hashing import derive
from shoal.data.order import Permutation
from shoal.data.store import TokenStore
from shoal.errors import DataError, setting

Kind = Literal["stream", "documents"]

_Ints = NDArray[np.int64]
_Flags = NDArray[np.bool_]
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Rows:
    """Samples as they lie in the store; b of them.

    ``tokens`` int64 [b, T+1]; ``counts`` bool [b, T+1], whether a token counts where it is predicted; ``opens`` bool
    [b, T+1], whether a document begins there (padding is one of its own); ``filled`` int64 [b], tokens before padding.
    """

    tokens: _Ints
    counts: _Flags
    opens: _Flags
    filled: _Ints

    @staticmethod
    def empty(samples: int, width: int, pad: int) -> Rows:
        """``samples`` rows of nothing but padding."""
        shape = (samples, width)
        return Rows(np.full(shape, pad), np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(samples, np.int64))

    def put(self, places: _Flags | _Ints, other: Rows) -> None:
        """Overwrite the rows at ``places``."""
        for name in ("tokens", "counts", "opens", "filled"):
            getattr(self, name)[places] = getattr(other, name)


@dataclass(frozen=True)
class Statistics:
    """What packing makes of a store, over all its samples once.

    ``positions``  samples × T
    ``padded``     positions without a token to predict in their sample, because documents leave room
    ``counted``    positions whose prediction counts in the loss; in a stream whose documents are kept apart, the first
                   token of each, which is among them here, does not
    ``cut``        documents that lie in more than one sample
    ``left_out``   tokens in no sample: of documents in which nothing counts, or behind the last whole sample
    """

    samples: int
    positions: int
    padded: int
    counted: int
    cut: int
    left_out: int


class Packing(Protocol):
    """The samples of one store, numbered from 0."""

    def __len__(self) -> int: ...

    def rows(self, samples: _Ints) -> Rows: ...

    @property
    def statistics(self) -> Statistics: ...


def pack(store: TokenStore, seq_len: int, kind: Kind) -> Packing:
    """The samples of ``store``. Raises DataError when there is none, or none in which a token counts."""
    packing: Packing = Windows(store, seq_len) if kind == "stream" else Documents(store, seq_len)
    if len(packing) == 0:
        problem = f"no sample of {store.path} has a token that counts"
        raise DataError(setting("data.seq_len", seq_len, problem, "make the store again from text with answers in it"))
    return packing


class Windows:
    """Windows of the stream, documents one behind the other: sample k covers the tokens [k T, k T + T + 1), so that no
    token is predicted twice. With a loss mask, windows in which nothing counts are passed over.

    Raises DataError when the store holds not one window.
    """

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        self._store, self._seq_len = store, seq_len
        self._windows = (len(store) - 1) // seq_len
        if self._windows < 1:
            problem = f"a sample takes {seq_len + 1} tokens and {store.path} has {len(store)}"
            raise DataError(setting("data.seq_len", seq_len, problem, f"at most {len(store) - 1}, or more text"))
        self._kept: _Ints | None = None
        self._counted = self._windows * seq_len
        if store.counts is not None:
            bounds = np.arange(self._windows + 1) * seq_len + 1
            counted = np.diff(_counted_before(store.counts, bounds))
            self._kept, self._counted = np.flatnonzero(counted), int(counted.sum())

    def __len__(self) -> int:
        return self._windows if self._kept is None else len(self._kept)

    def rows(self, samples: _Ints) -> Rows:
        """The rows of ``samples`` (int64)."""
        starts = (samples if self._kept is None else self._kept[samples]) * self._seq_len
        width, store = self._seq_len + 1, self._store
        tokens = np.stack([store.tokens[at : at + width] for at in starts.tolist()]).astype(np.int64)
        counts = np.ones(tokens.shape, bool)
        if store.counts is not None:
            counts = np.stack([store.counts[at : at + width] for at in starts.tolist()]).astype(bool)
        opens = np.zeros(tokens.shape, bool)
        for row, at in zip(opens, starts.tolist(), strict=True):
            first, last = np.searchsorted(store.documents, [at, at + width])
            row[store.documents[first:last] - at] = True
        return Rows(tokens, counts, opens, np.full(len(tokens), width))

    @property
    def statistics(self) -> Statistics:
        starts, ends = self._store.documents[:-1], self._store.documents[1:]
        # A document in which nothing follows anything (one token) is cut by no bound.
        cut = int(np.count_nonzero(starts // self._seq_len < (ends - 2) // self._seq_len))
        positions = len(self) * self._seq_len
        return Statistics(len(self), positions, 0, self._counted, cut, len(self._store) - 1 - positions)


class Documents:
    """Whole documents side by side, by best fit, and padding behind them: a sample begins with a document.

    A document of more than T + 1 tokens is cut, like a stream, into parts that are samples' items of their own. With
    a loss mask, documents and parts in which nothing counts are left out. The same store and T give the same samples.
    """

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        self._store, self._seq_len = store, seq_len
        self._starts, self._lengths = _parts(store.documents, seq_len)
        counted = self._lengths - 1
        if store.counts is not None:
            bounds = np.stack([self._starts + 1, self._starts + self._lengths], axis=1)
            counted = np.diff(_counted_before(store.counts, bounds.ravel()).reshape(-1, 2))[:, 0]
        useful = counted > 0
        self._starts, self._lengths, self._counted = self._starts[useful], self._lengths[useful], counted[useful]
        # Documents of one length would go into a bin in their order: neighbours are often about the same.
        items = np.arange(useful.sum())
        scattered = Permutation(len(items), derive("packing"))(items) if len(items) else items
        bins = np.empty_like(items)
        bins[scattered] = best_fit(self._lengths[scattered], seq_len + 1)
        self._items = np.argsort(bins, kind="stable")
        self._bounds = np.searchsorted(bins[self._items], np.arange(bins.max(initial=-1) + 2))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def rows(self, samples: _Ints) -> Rows:
        """The rows of ``samples`` (int64). Padding is the token that ends documents, and counts nowhere."""
        store = self._store
        rows = Rows.empty(len(samples), self._seq_len + 1, store.eod or 0)
        for row, sample in enumerate(samples.tolist()):
            at = 0
            for item in self._items[self._bounds[sample] : self._bounds[sample + 1]].tolist():
                start, length = self._starts[item], self._lengths[item]
                here, there = slice(at, at + length), slice(start, start + length)
                rows.tokens[row, here] = store.tokens[there]
                rows.counts[row, here] = True if store.counts is None else store.counts[there]
                # The first token of a document is predicted from nothing, or from another document.
                rows.counts[row, at] = False
                rows.opens[row, at] = True
                at += length
            rows.opens[row, at : at + 1] = True
            rows.filled[row] = at
        return rows

    @cached_property
    def statistics(self) -> Statistics:
        positions, tokens = len(self) * self._seq_len, int(self._lengths.sum())
        padded = len(self) * (self._seq_len + 1) - tokens
        lengths = np.diff(self._store.documents)
        cut = int(np.count_nonzero(lengths > self._seq_len + 1))
        # A part of a cut document begins with the last token of the part before.
        repeated = int(np.count_nonzero(self._starts[1:] < (self._starts + self._lengths)[:-1]))
        left_out = len(self._store) - (tokens - repeated)
        return Statistics(len(self), positions, padded, int(self._counted.sum()), cut, left_out)


def _parts(documents: _Ints, seq_len: int) -> tuple[_Ints, _Ints]:
    """(starts, lengths) of the items of at most T + 1 tokens; part k of a document begins at its token k T."""
    lengths = np.diff(documents)
    parts = np.maximum(1, -(-(lengths - 1) // seq_len))
    owner = np.repeat(np.arange(len(lengths)), parts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    offsets = number * seq_len
    return documents[owner] + offsets, np.minimum(seq_len + 1, lengths[owner] - offsets)


def _counted_before(counts: NDArray[np.uint8], places: _Ints) -> _Ints:
    """How many tokens count before each of ``places`` (int64, ascending). The mask is read once, a block at a time."""
    found, before = np.zeros(len(places), np.int64), 0
    for start in range(0, len(counts), _BLOCK):
        running = np.cumsum(counts[start : start + _BLOCK], dtype=np.int64)
        here = slice(*np.searchsorted(places, [start, start + len(running)], side="right"))
        found[here] = before + running[places[here] - start - 1]
        before += int(running[-1])
    return found
