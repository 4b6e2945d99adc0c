"""The norm of all gradients, of which each rank adds up what it has: every logical element once.

Where all ranks have all of them, each adds up its share, and they add those: one number on its way costs less than a
pass over all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.collectives import Pending, all_reduce, start_all_reduce
from shoal.comm.world import Group
from shoal.data_parallel.entry import Main
from shoal.data_parallel.flat import Flat
from shoal.mesh import Mesh
from shoal.optim.clip import global_norm, squared_norm


class Norm:
    """Of the gradients in ``flats``, whose sums :meth:`add` is told of."""

    def __init__(self, flats: Sequence[Flat], mesh: Mesh) -> None:
        self._squares = torch.zeros((), dtype=torch.float64, device=mesh.world.device)
        self._group = mesh.world.everyone
        self._alike = _all_alike(flats, mesh)
        """Whether every rank has every sum."""

    def begin(self) -> None:
        """Nothing has been added."""
        self._squares.zero_()

    def add(self, flat: Flat, mains: Sequence[Main]) -> None:
        """A bucket's sums are there. An element of which several ranks tell the norm counts once between them."""
        squares, group = self._squares, self._group
        if flat.buffered and self._alike:
            size = flat.bucket.high - flat.bucket.low
            start, stop = (size * place // group.size for place in (group.index, group.index + 1))
            for _, part in flat.pieces("gradient", start, stop):
                squares += squared_norm(part).to(squares.device)
        elif flat.buffered:
            for start, stop, division in flat.bucket.own_ranges():
                for _, part in flat.pieces("gradient", start, stop):
                    squares += squared_norm(part).to(squares.device) / len(division.same)
        elif self._alike:
            assert group.size == 1, "gradients that are shared are in a buffer"
            squares += squared_norm(*(main.gradient for main in mains))
        else:
            for main in mains:
                for one in main.held.fragments("gradient", main.gradient):
                    squares += squared_norm(one.tensor) / len(one.copies)

    def find(self, group: Group | None = None) -> float:
        """The norm of all that has been added, or of what the ranks of ``group`` have."""
        if group is None or self._alike:
            group = self._group
        return global_norm(self._squares, group)

    def take(self) -> Tensor:
        """What this rank has of the norm's square, a float64 scalar; the next batch has another."""
        squares = self._squares.clone()
        self._squares.zero_()
        return squares

    def start(self) -> tuple[Tensor, Pending]:
        """The square of the norm, and when it is there; the next batch has another."""
        squares = self.take()
        return squares, start_all_reduce(squares, self._group, "norm")


def _all_alike(flats: Sequence[Flat], mesh: Mesh) -> bool:
    """Whether every rank has every reduced gradient."""
    world = mesh.world
    everything = all(len(each.division.same) == world.size for flat in flats for each in flat.bucket.ranges)
    agreed = torch.tensor([everything], dtype=torch.int64, device=world.device)
    all_reduce(agreed, world.everyone, "start", "min")
    return bool(agreed.item())
