"""Attention while keys and values go round a ring of ranks (Liu et al. 2023; zigzag: ring-flash-attention).

Queries stay. At each hop a rank works on the keys and values that it has while the next ones come from its neighbour:
K and V in one message, never repeated for the query heads that share them. No rank ever holds more than three ranks'
share. Backward they go round once more; their gradients go with them a hop behind, gathering each rank's terms in
float32 or wider, and from the last rank that has any straight home.

Words that a rank receives, of S positions over P ranks, w elements of a key and a value together: (P − 1)/P·S·w
forward; backward as many again and S·w of gradients. Less where a window or documents leave blocks empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import Pending, start_exchange
from shoal.comm.differentiable import Arriving
from shoal.comm.world import Group
from shoal.context.blocks import Result, Saved, attend, attend_backward
from shoal.context.plan import Plan
from shoal.meter import mark
from shoal.purposes import COMMUNICATION

PURPOSE = "context"


def ring_attention(q_BKGQD: Tensor, k_BKQD: Tensor, v_BKQD: Tensor, plan: Plan, group: Group) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks of ``group``, [B, K, G, Q, D]."""
    out: Tensor = _Ring.apply(q_BKGQD, k_BKQD, v_BKQD, plan, group)  # type: ignore[no-untyped-call]
    return out


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group) -> Tensor:
        kv, result = torch.stack((k, v)), Result.of_nothing(q)
        for _, source, there in _travel(kv, plan, group):
            for block in plan.blocks[source]:
                attend(q, there, block, plan.sight, result)
        out = result.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, result.lse)
        ctx.plan, ctx.group = plan, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, kv, out, lse), plan, group = ctx.saved_tensors, ctx.plan, ctx.group
        saved, exact = Saved(q, out, lse, grad), lse.dtype
        dq = torch.zeros_like(q, dtype=exact)
        going, home = Homeward(plan, group), None
        for hop, source, there in _travel(kv, plan, group):
            found = torch.zeros_like(there, dtype=exact)
            for block in plan.blocks[source]:
                attend_backward(saved, there, block, plan.sight, dq, found)
            if (earlier := going.arrived()) is not None:
                found += earlier
            if hop == plan.hops[source] == 0:
                home = found
            going.start(hop, found)
        going.arrived()
        home = going.home if home is None else home
        assert home is not None, "every rank has keys of its own"
        dk, dv = home.to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _travel(kv: Tensor, plan: Plan, group: Group) -> Iterator[tuple[int, int, Tensor]]:
    """The hop, and the place whose keys and values are here, as long as any are under way; the next ones are fetched
    meanwhile."""
    size, at, last = group.size, group.index, max(plan.hops)
    rooms = [torch.empty_like(kv) for _ in range(min(last, 2))]
    mark(COMMUNICATION, *rooms)
    for hop in range(last + 1):
        source, room = (at - hop) % size, rooms[hop % 2] if hop < last else None
        coming = None if room is None else _start_hop(kv, room, hop, plan, group)
        yield hop, source, kv
        if coming is not None and room is not None:
            coming.wait()
            kv = room


def _start_hop(kv: Tensor, into: Tensor, hop: int, plan: Plan, group: Group) -> Pending:
    """Begin to pass on what is here to the next rank, and to take in what the one before has, where they are needed
    any further."""
    size, at = group.size, group.index
    given, taken = [0] * size, [0] * size
    given[(at + 1) % size] = kv.numel() * (plan.hops[(at - hop) % size] > hop)
    taken[(at - 1) % size] = kv.numel() * (plan.hops[(at - hop - 1) % size] > hop)
    return start_exchange(into.view(-1)[: sum(taken)], taken, kv.view(-1)[: sum(given)], given, group, PURPOSE)


class Homeward:
    """Gradients of keys and values on their way round the ring, each behind those that it is of."""

    def __init__(self, plan: Plan, group: Group) -> None:
        self._plan, self._group = plan, group
        self._coming: Arriving[Tensor | None] | None = None
        self.home: Tensor | None = None
        """Those of this rank's own keys and values, once they have come."""

    def start(self, hop: int, found: Tensor) -> None:
        """Begin to pass on those ``found`` at this hop: to the next rank, or home from the last that has any."""
        size, at, hops = self._group.size, self._group.index, self._plan.hops
        if max(hops) == 0:
            return
        source, words = (at - hop) % size, found.numel()
        given, taken = [0] * size, [0] * size
        if hop < hops[source]:
            given[(at + 1) % size] = words
        elif hop == hops[source] > 0:
            given[source] = words
        passed_on = hop < hops[(source - 1) % size]
        comes_home = hop == hops[at] > 0
        before, last = (at - 1) % size, (at + hop) % size
        taken[before] += words * passed_on
        taken[last] += words * comes_home
        senders = [place for place in range(size) if taken[place]]
        into = found.new_empty((len(senders), *found.shape))
        mark(COMMUNICATION, into)
        out = found.view(-1)[: sum(given)]
        pending = start_exchange(into.view(-1), taken, out, given, self._group, PURPOSE)

        def arrange() -> Tensor | None:
            parts = dict(zip(senders, into, strict=True))
            if comes_home:
                self.home = parts[last]
            return parts[before] if passed_on else None

        self._coming = Arriving(pending, arrange)

    def arrived(self) -> Tensor | None:
        """Those that the rank before has passed on at the last hop, if it has."""
        coming, self._coming = self._coming, None
        return None if coming is None else coming.wait()
