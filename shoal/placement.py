"""Where a tensor lies: which boxes of which logical tensors the local one holds, and what follows from that.

A logical tensor is what one device would hold, under the name it has in a checkpoint. A local tensor holds *pieces* of
logical tensors: the whole of one, a block of one, or blocks of several when weights are fused (query, key and value in
one matrix). Padding is in no piece.

From a :class:`Rule`, which gives the placement at any coordinates of the mesh, a :class:`Census` derives who must sum
gradients with whom and how often an element is held, and :func:`divide` (or :func:`serve`) who may shard what they
hold. Nothing lists such groups by hand: data and context parallelism, replicated key/value heads, tied embeddings on
two stages are all the same derivation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod

from torch import Tensor

from shoal.mesh import Coords, Grid

Span = tuple[int, int]
Box = tuple[Span, ...]

LOCKSTEP = ("dp", "cp", "depth", "a")
"""The mesh axes whose ranks run the same layers at the same time, so that they can wait for each other at any layer,
and have samples of their own, so that what they hold alike is worth dividing: replicas, the depth of a 2.5-D grid, and
the side of a 3-D one that divides samples."""


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor, and where it lies in the local one.

    ``name`` and ``shape`` are the logical tensor's; ``box`` is the part held, ``at`` its place in the local tensor:
    half-open (start, stop) per dim.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    at: Box

    def of(self, local: Tensor) -> Tensor:
        """The view of this piece in the ``local`` tensor."""
        return local[tuple(slice(start, stop) for start, stop in self.at)]

    @property
    def numel(self) -> int:
        return prod(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class Placement:
    """The pieces of one local tensor of ``shape``, and the mesh axes on which the *work* is duplicated.

    On a duplicated axis every rank computes the same gradient, so summing over it would count it twice.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    duplicated: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rule:
    """A tensor's placement as a function of mesh coordinates.

    ``place`` returns None where the tensor is not held. It is given the coordinates on ``axes`` and no others, so that
    deriving groups enumerates those alone, however large the world.
    """

    place: Callable[[Coords], Placement | None]
    axes: frozenset[str] = frozenset()

    def at(self, coords: Coords) -> Placement | None:
        """The placement at ``coords``."""
        return self.place({axis: coords[axis] for axis in self.axes})


@dataclass(frozen=True)
class Holders:
    """Who holds a piece: all the ranks with ``copies`` of it, and those of them, ``summing``, that must add up their
    gradients."""

    copies: tuple[int, ...]
    summing: tuple[int, ...]


@dataclass(frozen=True)
class Division:
    """How the holders of a piece divide it, seen from one of them (ZeRO, Rajbhandari et al. 2020).

    The ranks ``shard`` hold one part each, this rank part number ``part``: they reduce-scatter gradients and gather
    parameters. ``cross`` are the ranks that must then sum this part, ``same`` all those that hold it. When nothing is
    divided, ``shard`` is this rank alone, ``cross`` are the summing ranks and ``same`` all copies.

    Under a parameter server only some of ``shard`` hold parts, its ``servers``. The others have none: their ``part`` is
    the one after the last, ``cross`` they are alone, and ``same`` is nobody.
    """

    shard: tuple[int, ...]
    part: int
    cross: tuple[int, ...]
    same: tuple[int, ...]
    across_stages: bool = False
    """Whether the summing ranks are of several pipeline stages."""
    servers: tuple[int, ...] = ()

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that hold the parts, in their order."""
        return self.servers or self.shard


@dataclass(frozen=True)
class Fragment:
    """What this rank has of one logical tensor: a box of it, its contents, and every rank with a copy of that box.

    ``kind`` tells the tensors of one name apart: "weight", "gradient", or an optimizer state such as "exp_avg".
    ``tensor`` is a view: writing to it writes the model.
    """

    kind: str
    piece: Piece
    copies: tuple[int, ...]
    tensor: Tensor


def whole(name: str, shape: Sequence[int]) -> Placement:
    """The placement of a tensor that is held entire."""
    box = tuple((0, n) for n in shape)
    return Placement(tuple(shape), (Piece(name, tuple(shape), box, box),))


def stacked(parts: Sequence[tuple[str, int]], shape: Sequence[int]) -> Placement:
    """The placement of a whole tensor of ``shape`` that stacks logical tensors (name, rows) along dim 0."""
    assert sum(rows for _, rows in parts) == shape[0], f"{parts} does not fill {tuple(shape)}"
    pieces, start, rest = [], 0, tuple((0, n) for n in shape[1:])
    for name, rows in parts:
        pieces.append(Piece(name, (rows, *shape[1:]), ((0, rows), *rest), ((start, start + rows), *rest)))
        start += rows
    return Placement(tuple(shape), tuple(pieces))


@dataclass(frozen=True)
class Census:
    """Who holds each piece that a ``rule`` places on a ``grid``: counted once, however many ranks then ask."""

    rule: Rule
    grid: Grid

    def holders(self, coords: Coords) -> tuple[Holders, ...]:
        """For each piece held at ``coords``: every rank that holds the same box, and those that must sum with it.

        The summing ranks are the holders less those that merely repeat the work, which differ on a duplicated axis.
        """
        mine = self.rule.at(coords)
        assert mine is not None, "a rank derives the holders of what it holds"
        own = tuple((axis, coords[axis]) for axis in sorted(mine.duplicated))
        places = (tuple(self._places[piece.name, piece.box]) for piece in mine.pieces)
        return tuple(_expand(self.grid, self._read, each, own) for each in places)

    @cached_property
    def _read(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.grid.names if axis in self.rule.axes)

    @cached_property
    def _places(self) -> dict[tuple[str, Box], list[tuple[int, ...]]]:
        """Where on the axes that the rule reads each box of each logical tensor is."""
        found: dict[tuple[str, Box], list[tuple[int, ...]]] = defaultdict(list)
        for place in self.grid.vary(dict.fromkeys(self.grid.names, 0), self._read):
            theirs = self.rule.at(place)
            held = set() if theirs is None else {(piece.name, piece.box) for piece in theirs.pieces}
            for piece in held:
                found[piece].append(tuple(place[axis] for axis in self._read))
        return found


def holders(rule: Rule, grid: Grid, coords: Coords) -> tuple[Holders, ...]:
    """What a :class:`Census` says to the one rank at ``coords``."""
    return Census(rule, grid).holders(coords)


@lru_cache(maxsize=4096)
def _expand(
    grid: Grid, read: tuple[str, ...], places: tuple[tuple[int, ...], ...], own: tuple[tuple[str, int], ...]
) -> Holders:
    """The ranks at ``places`` on the axes ``read``, anywhere on the others; those that share ``own`` are to sum.

    Hundreds of tensors of a model have the same answer, which takes a walk over the world to find.
    """
    free = tuple(axis for axis in grid.names if axis not in read)
    copies, summing = [], []
    for place in places:
        start = {**dict.fromkeys(free, 0), **dict(zip(read, place, strict=True))}
        for other in grid.vary(start, free):
            copies.append(grid.rank(other))
            if all(other[axis] == at for axis, at in own):
                summing.append(copies[-1])
    return Holders(tuple(sorted(copies)), tuple(sorted(summing)))


@lru_cache(maxsize=4096)
def divide(who: Holders, grid: Grid, rank: int, size: int) -> Division:
    """Divide what ``who`` hold over groups of ``size`` ranks (fewer, where fewer hold it) that move in lockstep.

    Never over ranks of different stages: one would wait for a gather while the other waits for its activations. Where
    fewer ranks hold it than hold other things, as is so of experts, groups are of a size that divides them.
    """
    lines = _lines(who, grid)
    if (most := len(lines[0])) > size:
        size = gcd(size, most)
    part = {copy: place % size for line in lines for place, copy in enumerate(line)}
    mine = next(line for line in lines if rank in line)
    assert len(mine) <= size or len(mine) % size == 0, f"{len(mine)} ranks in groups of {size}"
    start = mine.index(rank) // size * size
    return Division(
        shard=tuple(mine[start : start + size]),
        part=part[rank],
        cross=tuple(other for other in who.summing if part[other] == part[rank]),
        same=tuple(other for other in who.copies if part[other] == part[rank]),
        across_stages=_across_stages(who, grid),
    )


@lru_cache(maxsize=4096)
def serve(who: Holders, grid: Grid, rank: int, servers: int) -> Division:
    """Divide what ``who`` hold, among ranks that move in lockstep, over those of the first ``servers`` replicas."""
    lines = _lines(who, grid)
    owners = [[copy for copy in line if grid.coords(copy)["dp"] < servers] for line in lines]
    part = {owner: place for line in owners for place, owner in enumerate(line)}
    mine, serving = next((line, those) for line, those in zip(lines, owners, strict=True) if rank in line)
    assert serving, f"ranks {mine} have no server among {servers} replicas"
    own = part.get(rank)
    return Division(
        shard=tuple(mine),
        part=len(serving) if own is None else own,
        cross=(rank,) if own is None else tuple(other for other in who.summing if part.get(other) == own),
        same=() if own is None else tuple(other for other in who.copies if part.get(other) == own),
        across_stages=_across_stages(who, grid),
        servers=tuple(serving),
    )


def _lines(who: Holders, grid: Grid) -> list[list[int]]:
    """The copies, those together that move in lockstep."""
    lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for copy in who.copies:
        coords = grid.coords(copy)
        lines[tuple(at for axis, at in coords.items() if axis not in LOCKSTEP)].append(copy)
    return list(lines.values())


def _across_stages(who: Holders, grid: Grid) -> bool:
    return len({grid.coords(other).get("pp") for other in who.summing}) > 1


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up the elements ``start`` … ``stop`` − 1 of a row-major tensor, in order: at most 2n − 1 of
    them for n dims, each of them consecutive elements."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    width = prod(shape[1:])
    first, last = -(-start // width), stop // width  # whole rows
    if first > last:  # inside one row
        yield from _row_boxes(shape, last, start - last * width, stop - last * width)
        return
    yield from _row_boxes(shape, first - 1, start - (first - 1) * width, width if start < first * width else 0)
    if first < last:
        yield ((first, last), *((0, n) for n in shape[1:]))
    yield from _row_boxes(shape, last, 0, stop - last * width)


def _row_boxes(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], start, stop):
        yield ((row, row + 1), *box)


def assemble(shape: Sequence[int], held: Sequence[tuple[Box, Tensor]]) -> Tensor:
    """The full tensor of ``shape`` from boxes and their contents; an element that no box covers is NaN.

    Floating point only. The dtype and device are those of the first box.
    """
    first = held[0][1]
    full = first.new_full(tuple(shape), float("nan"))
    for box, part in held:
        full[tuple(slice(start, stop) for start, stop in box)] = part
    return full
