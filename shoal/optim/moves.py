"""Matrices that ranks hold in boxes meet whole on one rank each, and go back: who sends what to whom.

Boxes are whatever a layout makes of a matrix: flat ranges of ZeRO, rows and columns of tensor parallelism, copies of
replicas. The plan is made from a list of them and knows none of these.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.collectives import all_gather_bytes, start_exchange
from shoal.comm.world import Group
from shoal.placement import Box


class Move(NamedTuple):
    """A box of the matrix ``name`` that goes from one rank to another, or stays where it is. Ranks are places in a
    group."""

    name: str
    box: Box
    source: int
    to: int

    @property
    def numel(self) -> int:
        return _size(self.box)


class Held(NamedTuple):
    """What one rank has of a matrix of ``shape``."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Plan:
    """What one rank has to do with: the shapes of the matrices that it owns, the moves that bring matrices together and
    those that bring every box back to all who hold it. In one order on all ranks."""

    owned: dict[str, tuple[int, ...]]
    gather: tuple[Move, ...]
    scatter: tuple[Move, ...]


def agree(mine: Mapping[str, Held], group: Group, device: torch.device) -> list[dict[str, Held]]:
    """What each rank of ``group`` has, by the names of matrices."""
    every = all_gather_bytes(json.dumps(mine).encode(), group, device)
    return [{name: _held(*held) for name, held in json.loads(one).items()} for one in every]


def _held(shape: list[int], boxes: list[list[list[int]]]) -> Held:
    return Held(tuple(shape), tuple(tuple((start, stop) for start, stop in box) for box in boxes))


def plan(held: Sequence[Mapping[str, Held]], rank: int) -> Plan:
    """The part of ``rank`` when the ranks 0, 1, … have ``held``.

    A matrix is owned by a rank that has much of it, so that little moves: of those that have at least half as much as
    the one that has most, the one with the least work. Each box comes from the rank nearest to the owner.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for each, of_rank in enumerate(held):
        for name in of_rank:
            holders[name].append(each)
    shapes = {name: held[ranks[0]][name].shape for name, ranks in holders.items()}
    work: Counter[int] = Counter()
    owned, gather, scatter = {}, [], []
    for name in sorted(holders, key=lambda name: (-_work(shapes[name]), name)):
        copies: dict[Box, list[int]] = defaultdict(list)
        amount: Counter[int] = Counter()
        for each in holders[name]:
            for box in held[each][name].boxes:
                copies[box].append(each)
                amount[each] += _size(box)
        assert sum(map(_size, copies)) == prod(shapes[name]), f"{name}: its boxes are not all of it, or overlap"
        most = max(amount.values())
        owner = min((each for each in amount if 2 * amount[each] >= most), key=lambda each: (work[each], each))
        work[owner] += _work(shapes[name])
        if rank == owner:
            owned[name] = shapes[name]
        for box, ranks in copies.items():
            source = min(ranks, key=lambda each: abs(each - owner))
            gather += [Move(name, box, source, owner)] if rank in (source, owner) else []
            scatter += [Move(name, box, owner, to) for to in ranks if rank in (owner, to)]
    return Plan(owned, tuple(gather), tuple(scatter))


def carry(
    moves: Sequence[Move],
    take: Callable[[Move], Tensor],
    put: Callable[[Move, Tensor], None],
    group: Group,
    like: Tensor,
    purpose: str,
) -> None:
    """Bring the contents of boxes, ``take(move)``, to where they go, and ``put`` them there, flat; in one exchange.

    ``like`` gives the dtype and device of all of them. Words received are entered in the ledger for ``purpose``.
    """
    out: list[list[Move]] = [[] for _ in group.ranks]
    into: list[list[Move]] = [[] for _ in group.ranks]
    for move in moves:
        if move.source != move.to:
            (out[move.to] if move.source == group.index else into[move.source]).append(move)
    sent = torch.cat([like.new_empty(0), *(take(move).reshape(-1).to(like) for to_one in out for move in to_one)])
    sizes = [[sum(move.numel for move in of_one) for of_one in each] for each in (into, out)]
    received = like.new_empty(sum(sizes[0]))
    pending = start_exchange(received, sizes[0], sent, sizes[1], group, purpose)
    for move in moves:
        if move.source == move.to:
            put(move, take(move).reshape(-1))
    pending.wait()
    arrived = [move for from_one in into for move in from_one]
    for move, values in zip(arrived, received.split([move.numel for move in arrived]), strict=True):
        put(move, values)


def _size(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def _work(shape: Sequence[int]) -> int:
    return prod(shape) * min(shape)
