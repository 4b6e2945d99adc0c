"""Parameters and main gradients in flat buffers, so that one collective or one update serves many tensors.

A bucket holds the parameters of consecutive units (layers). Its gradients become complete together in the backward
pass, last unit first, and the ranks that must sum them are the same for all of it or for known ranges of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.local import LocalParameter
from shoal.placement import Holders, Piece, Placement

BUCKET_BYTES = 16 << 20


class Slot(NamedTuple):
    """Where a parameter lies in the buffers of its bucket."""

    held: LocalParameter
    start: int
    stop: int


class Range(NamedTuple):
    """Consecutive elements of a bucket that the same ranks hold and sum."""

    start: int
    stop: int
    holders: Holders


class Bucket:
    """``params``, ``grads`` and the optimizer's ``states``, flat and parallel; ``ranges`` cuts them where the holders
    change.

    The parameters' own data become views of ``params``. They lie by unit, last unit first, those that decay before
    those that do not.
    """

    def __init__(self, held: Sequence[LocalParameter], states: Sequence[str]) -> None:
        first = held[0].parameter
        self.units = frozenset(one.unit for one in held)
        self.slots: list[Slot] = []
        for one in held:
            start = self.slots[-1].stop if self.slots else 0
            self.slots.append(Slot(one, start, start + one.parameter.numel()))
        self.params = torch.empty(self.slots[-1].stop, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros_like(self.params)
        self.ranges = _ranges(self.slots)
        self.states = {name: torch.zeros_like(self.params) for name in states}
        with torch.no_grad():
            for one, start, stop in self.slots:
                view = self.params[start:stop].view_as(one.parameter)
                view.copy_(one.parameter)
                one.parameter.data = view

    def grad(self, slot: Slot) -> Tensor:
        """The main gradient of one parameter, in its shape."""
        return self.view(self.grads, slot)

    @staticmethod
    def view(flat: Tensor, slot: Slot) -> Tensor:
        """One parameter's part of a buffer of this bucket, in its shape."""
        return flat[slot.start : slot.stop].view_as(slot.held.parameter)

    def decay_runs(self) -> list[tuple[int, int, bool]]:
        """(start, stop, decays) of the runs of parameters that decay and that do not."""
        runs = []
        for decay, run in groupby(self.slots, key=lambda slot: slot.held.decays):
            slots = list(run)
            runs.append((slots[0].start, slots[-1].stop, decay))
        return runs

    def check_views(self) -> None:
        """Assert that the parameters still are views of the buffer (an assignment to ``.data`` would part them)."""
        for one, start, stop in self.slots:
            if start == stop:
                continue  # nothing there to have an address
            wanted = self.params.data_ptr() + start * self.params.element_size()
            assert one.parameter.data_ptr() == wanted, f"{one.name} no longer lies in its bucket"


def build_buckets(
    held: Iterable[LocalParameter], states: Sequence[str] = (), cap_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Buckets in the order in which the backward pass completes them: the same on every rank that holds the same.

    Whole units are put together until a bucket would exceed ``cap_bytes``; dtypes never mix.
    """
    ordered = sorted(held, key=lambda one: (str(one.parameter.dtype), -one.unit, not one.decays))
    buckets: list[Bucket] = []
    waiting: list[LocalParameter] = []
    size = 0
    for _, unit in groupby(ordered, key=lambda one: (one.parameter.dtype, one.unit)):
        members = list(unit)
        more = sum(one.parameter.numel() * one.parameter.element_size() for one in members)
        if waiting and (size + more > cap_bytes or waiting[-1].parameter.dtype != members[0].parameter.dtype):
            buckets.append(Bucket(waiting, states))
            waiting, size = [], 0
        waiting += members
        size += more
    if waiting:
        buckets.append(Bucket(waiting, states))
    return sorted(buckets, key=lambda bucket: -min(bucket.units))


def _ranges(slots: Iterable[Slot]) -> list[Range]:
    """The slots' elements, cut where the holders change."""
    merged = []
    for holders, run in groupby(
        (part for slot in slots for part in _piece_ranges(slot)), key=lambda part: part.holders
    ):
        parts = list(run)
        merged.append(Range(parts[0].start, parts[-1].stop, holders))
    return merged


def _piece_ranges(slot: Slot) -> list[Range]:
    """The flat range of each piece of a parameter. Pieces that others hold must be whole rows of it."""
    held, start, stop = slot
    if len(set(held.holders)) == 1:
        return [Range(start, stop, held.holders[0])]
    found = []
    width = held.parameter[0].numel()
    for piece, holders in zip(held.placement.pieces, held.holders, strict=True):
        assert _whole_rows(piece, held.placement), f"{held.name}: pieces with different holders must be rows"
        top, bottom = piece.at[0]
        found.append(Range(start + top * width, start + bottom * width, holders))
    return found


def _whole_rows(piece: Piece, placement: Placement) -> bool:
    return piece.at[1:] == tuple((0, n) for n in placement.shape[1:])
