"""Which parameters are reduced together: the geometry of flat buffers, without their memory.

A bucket holds the parameters of consecutive units (layers). Its gradients become complete together in the backward
pass, last unit first, and all of it is divided over the same ranks. Parameters that other ranks hold in other company
(a norm beside matrices that tensor parallelism divides unevenly, a tied embedding) have buckets of their own, so that
a part of a bucket is the same part of the same parameters wherever it is held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.local import LocalParameter
from shoal.optim.treatment import Treat, Treatment
from shoal.placement import Division, Fragment, Holders, Piece, Placement, flat_boxes

BUCKET_BYTES = 16 << 20


class Slot(NamedTuple):
    """Where a parameter lies in the buffers of its bucket."""

    held: LocalParameter
    start: int
    stop: int

    def of(self, flat: Tensor) -> Tensor:
        """The parameter's part of a buffer, in its shape."""
        return flat[self.start : self.stop].view(self.held.placement.shape)


class Range(NamedTuple):
    """Consecutive elements of a bucket that the same ranks hold, sum and divide."""

    start: int
    stop: int
    division: Division


class OwnBox(NamedTuple):
    """Consecutive elements of this rank's part of a bucket, counted from its beginning, that are one box of a logical
    tensor: ``piece`` in the parameter of slot number ``slot``."""

    start: int
    stop: int
    slot: int
    piece: Piece
    who: Holders
    treatment: Treatment


class Bucket:
    """Parameters side by side, all with the same optimizer: ``slots`` by unit, last unit first, those that decay before
    those that do not; ``ranges`` cuts the same elements where the holders change.

    ``shard`` are the ranks that divide the bucket, or have it divided by those of them that are its ``owners``; this
    one's part is ``low`` … ``high`` − 1 of its ``size`` elements, which are rounded up to a multiple of the owners.
    """

    def __init__(self, held: Sequence[LocalParameter], divide: Callable[[Holders], Division], treat: Treat) -> None:
        self.dtype, self.device = held[0].parameter.dtype, held[0].parameter.device
        self.units = frozenset(unit for one in held for unit in one.units)
        self.name = held[0].name
        self.states = treat(held[0])[0].states
        self._treat = treat
        self.slots: list[Slot] = []
        for one in held:
            start = self.slots[-1].stop if self.slots else 0
            self.slots.append(Slot(one, start, start + one.parameter.numel()))
        self.ranges = _ranges(self.slots, divide)
        divisions = [part.division for part in self.ranges] or [divide(held[0].holders[0])]
        ((self.shard, self.owners),) = {(each.shard, each.owners) for each in divisions}
        each = -(-self.slots[-1].stop // len(self.owners))
        self.size = each * len(self.owners)
        part = divisions[0].part
        self.low, self.high = min(part * each, self.size), min(part * each + each, self.size)

    @property
    def alone(self) -> bool:
        """Whether no other rank has a part in the bucket's gradients."""
        return _alone(part.division for part in self.ranges)

    @property
    def spans_stages(self) -> bool:
        """Whether ranks of several pipeline stages sum the bucket, as they do a tied embedding."""
        return any(part.division.across_stages for part in self.ranges)

    def own_ranges(self) -> Iterator[Range]:
        """The ranges of this rank's part, counted from its beginning."""
        for start, stop, division in self.ranges:
            if (first := max(start, self.low)) < (last := min(stop, self.high)):
                yield Range(first - self.low, last - self.low, division)

    def own_boxes(self, begin: int = 0, end: int | None = None) -> Iterator[OwnBox]:
        """This rank's part, or its elements ``begin`` … ``end`` − 1, in order, as boxes of logical tensors."""
        low, high = self.low + begin, self.high if end is None else self.low + end
        for number, slot in enumerate(self.slots):
            for (piece, who, (start, stop)), treatment in zip(_piece_spans(slot), self._treat(slot.held), strict=True):
                first, last = max(start, low), min(stop, high)
                shape = tuple(high - low for low, high in piece.box)
                for box in flat_boxes(shape, first - start, last - start):
                    length = prod(high - low for low, high in box)
                    logical = tuple((a + at, b + at) for (a, b), (at, _) in zip(box, piece.box, strict=True))
                    local = tuple((a + at, b + at) for (a, b), (at, _) in zip(box, piece.at, strict=True))
                    held = Piece(piece.name, piece.shape, logical, local)
                    yield OwnBox(first - self.low, first - self.low + length, number, held, who, treatment)
                    first += length

    def own_fragments(
        self, kind: str, part: Tensor, divide: Callable[[Holders], Division], begin: int = 0
    ) -> Iterator[Fragment]:
        """The boxes of logical tensors in ``part``, a tensor that lies as this rank's part of the bucket does from
        element ``begin`` on."""
        for start, stop, _, piece, who, _ in self.own_boxes(begin, begin + len(part)):
            values = part[start - begin : stop - begin].view([high - low for low, high in piece.box])
            yield Fragment(kind, piece, divide(who).same, values)


def build_buckets(
    held: Iterable[LocalParameter],
    divide: Callable[[Holders], Division],
    treat: Treat,
    cap_bytes: int = BUCKET_BYTES,
) -> list[Bucket]:
    """Buckets in the order in which the backward pass completes them: the same on every rank that holds the same.

    Whole units are put together until a bucket would exceed ``cap_bytes``, if it is sent at all; parameters of other
    dtypes, holders or optimizers never mix, and one that several stages share is by itself.
    """
    alike: dict[tuple[torch.dtype, tuple[Holders, ...], str], list[LocalParameter]] = defaultdict(list)
    buckets = []
    for one in held:
        if any(divide(who).across_stages for who in one.holders):
            buckets.append(Bucket([one], divide, treat))  # each stage has an order of its own
        else:
            alike[one.parameter.dtype, tuple(dict.fromkeys(one.holders)), treat(one)[0].name].append(one)
    for (_, holders, _), members in alike.items():
        sent = not _alone(divide(who) for who in holders)
        buckets += _fill(members, divide, treat, cap_bytes if sent else 0)
    return sorted(buckets, key=lambda one: (-min(one.units), one.name))


def _fill(
    members: Sequence[LocalParameter], divide: Callable[[Holders], Division], treat: Treat, cap_bytes: int
) -> Iterator[Bucket]:
    waiting: list[LocalParameter] = []
    size = 0
    first = {one.name: treat(one)[0] for one in members}
    ordered = sorted(members, key=lambda one: (-one.unit, -first[one.name].weight_decay, first[one.name].lr))
    for _, unit in groupby(ordered, key=lambda one: one.unit):
        together = list(unit)
        more = sum(one.parameter.numel() * one.parameter.element_size() for one in together)
        if waiting and size + more > cap_bytes:
            yield Bucket(waiting, divide, treat)
            waiting, size = [], 0
        waiting += together
        size += more
    yield Bucket(waiting, divide, treat)


def _alone(divisions: Iterable[Division]) -> bool:
    return all(len(each.shard) == len(each.cross) == 1 for each in divisions)


def _ranges(slots: Iterable[Slot], divide: Callable[[Holders], Division]) -> list[Range]:
    """The slots' elements, cut where the holders change."""
    spans = [(span, divide(who)) for slot in slots for _, who, span in _piece_spans(slot)]
    merged = []
    for division, run in groupby(spans, key=lambda each: each[1]):
        parts = [span for span, _ in run]
        if parts[0][0] < parts[-1][1]:
            merged.append(Range(parts[0][0], parts[-1][1], division))
    return merged


def _piece_spans(slot: Slot) -> Iterator[tuple[Piece, Holders, tuple[int, int]]]:
    """Each piece of a parameter, who holds it, and its (start, stop) in the bucket. Pieces must be whole rows."""
    held, start, _ = slot
    width = prod(held.placement.shape[1:])
    for piece, who in zip(held.placement.pieces, held.holders, strict=True):
        assert _whole_rows(piece, held.placement), f"{held.name}: pieces of a parameter must be rows of it"
        top, bottom = piece.at[0] if piece.at else (0, 1)
        yield piece, who, (start + top * width, start + bottom * width)


def _whole_rows(piece: Piece, placement: Placement) -> bool:
    return piece.at[1:] == tuple((0, n) for n in placement.shape[1:])
