"""A layout on a world of ranks: who sits where, and the process group over any of them.

:class:`Grid` is pure arithmetic and serves any rank of any world; :class:`Mesh` adds this process and its groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from shoal.comm.world import Group, World

Coords = Mapping[str, int]


@dataclass(frozen=True)
class Grid:
    """Named mesh axes with their sizes, outermost first; ranks count with the last axis fastest."""

    axes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        return prod(n for _, n in self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinate of ``rank`` on each axis."""
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"
        found = {}
        for name, n in reversed(self.axes):
            rank, found[name] = divmod(rank, n)
        return {name: found[name] for name in self.names}

    def rank(self, coords: Coords) -> int:
        """The rank at ``coords``."""
        rank = 0
        for name, n in self.axes:
            rank = rank * n + coords[name]
        return rank

    def vary(self, coords: Coords, over: Collection[str]) -> Iterator[dict[str, int]]:
        """The coordinates of all ranks that differ from ``coords`` at most on the axes ``over``, in order of rank."""
        ranges = [range(n) if name in over else (coords[name],) for name, n in self.axes]
        for place in product(*ranges):
            yield dict(zip(self.names, place, strict=True))

    def label(self, ranks: Collection[int]) -> str:
        """The axes on which ``ranks`` differ, such as ``"dp"`` or ``"pp·dp"``; ``"none"`` for one rank."""
        places = [self.coords(rank) for rank in ranks]
        varying = [name for name in self.names if len({place[name] for place in places}) > 1]
        return "·".join(varying) or "none"


class Mesh:
    """A grid laid over a world: this rank's ``coords``, and groups named by the axes they span."""

    def __init__(self, axes: tuple[tuple[str, int], ...], world: World) -> None:
        self.grid = Grid(axes)
        assert self.grid.size == world.size, f"{self.grid.size} places for {world.size} ranks"
        self.world = world
        self.coords: Coords = self.grid.coords(world.rank)

    def group(self, ranks: Collection[int], channel: str = "") -> Group:
        """The process group over ``ranks``, this one among them."""
        return self.world.group(tuple(sorted(ranks)), self.grid.label(ranks), channel)

    def over(self, *axes: str, channel: str = "") -> Group:
        """The process group of the ranks that differ from this one only on ``axes``."""
        return self.group(self.ranks_over(*axes), channel)

    def ranks_over(self, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one only on ``axes``, ascending."""
        return tuple(self.grid.rank(place) for place in self.grid.vary(self.coords, axes))

    def open_groups(self, rank_sets: Collection[tuple[int, ...]]) -> None:
        """Make the groups of several sets of ranks at once, in one order on all ranks."""
        self.world.open_groups((tuple(sorted(ranks)), self.grid.label(ranks)) for ranks in rank_sets)
