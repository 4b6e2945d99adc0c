"""Which blocks of scores a rank has, and how far keys and values must travel for them.

Both follow from what all ranks know of a micro-batch: how positions are divided, the window, the documents. A block
that causality, the window or the documents leave empty is neither computed nor sent for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

from torch import Tensor

from shoal.context.zigzag import Division, Span, padded_documents

Kind = Literal["full", "causal", "masked"]


@dataclass(frozen=True)
class Block:
    """Some of this rank's queries with some keys of one place of the ring.

    In a ``full`` one every query looks at every key, in a ``causal`` one at those up to its own place. In a ``masked``
    one places decide, which begin at ``first_query`` and ``first_key`` and follow one another.
    """

    queries: slice
    keys: slice
    kind: Kind
    first_query: int = 0
    first_key: int = 0


@dataclass(frozen=True)
class Sight:
    """What limits a query besides causality: the ``window`` last places are seen, its own included, and of them those
    of its document. ``documents`` is int64 [samples, positions with their padding]."""

    window: int | None = None
    documents: Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """What one rank does: ``blocks`` by the place of the ring that keys come from. ``hops`` says how far along the ring
    the keys and values of each place are needed, 0 where by that place alone."""

    blocks: tuple[tuple[Block, ...], ...]
    hops: tuple[int, ...]
    sight: Sight = Sight()


Sees = Callable[[Span, Span], Kind | None]
"""What a span of queries has of a span of keys before it; None for nothing."""


def plan_of(division: Division, length: int, at: int, window: int | None, documents: Tensor | None) -> Plan:
    """The plan of the ranks at place ``at`` of a ring, for samples of ``length`` positions that have ``documents``
    (int64 [samples, length]) or none."""
    if window is not None and window >= length:
        window = None
    if documents is None:
        return _plan(division, division.padded(length), at, window)
    padded = division.padded(length)
    documents = padded_documents(documents, padded)
    return _make(division, padded, at, _seen(window, documents, division, padded), Sight(window, documents))


@lru_cache(maxsize=256)
def _plan(division: Division, padded: int, at: int, window: int | None) -> Plan:
    if window is None:
        places = range(division.ring)
        return Plan(tuple(_zigzag(division, padded, at, place) for place in places), (len(places) - 1,) * len(places))
    return _make(division, padded, at, lambda queries, keys: _within(window, queries, keys), Sight(window))


def _zigzag(division: Division, padded: int, at: int, source: int) -> tuple[Block, ...]:
    """Causality alone: half of the scores of a step, on every rank, in one block."""
    here = padded // division.ring
    half = here // division.chunks
    everything, first, second = slice(0, here), slice(0, half), slice(half, here)
    if source == at:
        return (Block(everything, everything, "causal"),)
    if source < at:
        return (Block(everything, first, "full"),)
    return (Block(second, everything, "full"),)


def _make(division: Division, padded: int, at: int, sees: Sees, sight: Sight) -> Plan:
    def blocks(place: int, source: int) -> Iterator[Block]:
        queries, keys = division.spans(padded, place), division.spans(padded, source)
        for (i, query), (j, key) in product(enumerate(queries), enumerate(keys)):
            kind: Kind | None = None
            if key[0] <= query[0] and (kind := sees(query, key)) == "full" and key == query:
                kind = "causal"
            if kind is not None:
                size = query[1] - query[0]
                rows, columns = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
                yield Block(rows, columns, kind, query[0], key[0])

    ring = range(division.ring)
    hops = tuple(max(hop for hop in ring if any(blocks((source + hop) % len(ring), source))) for source in ring)
    return Plan(tuple(tuple(blocks(at, source)) for source in ring), hops, sight)


def _within(window: int | None, queries: Span, keys: Span) -> Kind | None:
    """What the window leaves: of a span of keys that are not after the queries the nearest are seen first."""
    if window is None:
        return "full"
    if queries[0] - (keys[1] - 1) >= window:
        return None
    return "full" if queries[1] - 1 - keys[0] < window else "masked"


def _seen(window: int | None, documents: Tensor, division: Division, padded: int) -> Sees:
    """What the window and the documents leave, as far as the first and last document of a span tell."""
    chunks = documents.unflatten(1, (division.ring * division.chunks, -1))
    size = chunks.shape[2]
    bounds = list(zip(chunks.amin(2).tolist(), chunks.amax(2).tolist(), strict=True))  # once for all samples and spans

    def sees(queries: Span, keys: Span) -> Kind | None:
        if (kind := _within(window, queries, keys)) is None:
            return None
        q, k = queries[0] // size, keys[0] // size
        if all(last[q] < first[k] or last[k] < first[q] for first, last in bounds):
            return None
        return kind if all(first[q] == last[q] == first[k] == last[k] for first, last in bounds) else "masked"

    return sees
