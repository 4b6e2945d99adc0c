"""Positions for heads and back: attention sees whole sequences of some heads (DeepSpeed-Ulysses, Jacobs et al. 2023).

Before attention each of U ranks has some positions of all heads, in it all positions of N/U heads; one exchange brings
queries, keys and values together, another the result back. Where there are fewer key/value heads than ranks, each goes
to all the ranks whose query heads share it, and its gradients are added up on the way back.

Words that a rank receives, of S positions with n query and k key/value heads of d elements:
(U − 1)/U²·S·d·(2n + 2·max(k, U)), as many backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import start_exchange
from shoal.comm.world import Group
from shoal.context.ring import PURPOSE
from shoal.meter import mark
from shoal.purposes import COMMUNICATION

Three = tuple[Tensor, Tensor, Tensor]


def to_heads(q_BNTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, chunks: int, group: Group) -> Three:
    """Of the ranks' positions, ``chunks`` chunks of which each rank has a part, all those of this rank's heads."""
    found: Three = _ToHeads.apply(q_BNTD, k_BKTD, v_BKTD, chunks, group)  # type: ignore[no-untyped-call]
    return found


def to_positions(out_BNTD: Tensor, chunks: int, group: Group) -> Tensor:
    """The way back: of all ranks' heads this rank's positions."""
    found: Tensor = _ToPositions.apply(out_BNTD, chunks, group)  # type: ignore[no-untyped-call]
    return found


class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chunks: int, group: Group) -> Three:
        ctx.chunks, ctx.group, ctx.kv_heads = chunks, group, k.shape[1]
        apart = [_heads_apart(x, group.size) for x in (q, k, v)]
        q, k, v = (_join_positions(x, chunks) for x in _exchange(apart, group))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        apart = [_positions_apart(grad, ctx.chunks, ctx.group.size) for grad in grads]
        q, k, v = _exchange(apart, ctx.group)
        of_kv = (_sum_heads(x, ctx.kv_heads) for x in (k, v))
        return _join_heads(q), *of_kv, None, None


class _ToPositions(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, chunks: int, group: Group) -> Tensor:
        ctx.chunks, ctx.group = chunks, group
        return _join_heads(*_exchange([_positions_apart(out, chunks, group.size)], group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (found,) = _exchange([_heads_apart(grad, ctx.group.size)], ctx.group)
        return _join_positions(found, ctx.chunks), None, None


def heads_of(heads: int, ranks: int, at: int) -> range:
    """Which of the key/value heads rank ``at`` has: its own, or one that it shares with its neighbours."""
    first = at * heads // ranks
    return range(first, max(first + 1, (at + 1) * heads // ranks))


def _exchange(tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Of several tensors [ranks, …] give each rank what is its, and have of each what is this rank's."""
    each = torch.cat([x.flatten(1) for x in tensors], dim=1)
    words, size, at = each.shape[1], group.size, group.index
    sizes = [0 if rank == at else words for rank in range(size)]
    into = torch.empty_like(each)
    others = [rank for rank in range(size) if rank != at]
    coming, going = each.new_empty(words * len(others)), each[others].view(-1)
    mark(COMMUNICATION, coming, going)
    start_exchange(coming, sizes, going, sizes, group, PURPOSE).wait()
    into[others], into[at] = coming.view(-1, words), each[at]
    parts = into.split([x[0].numel() for x in tensors], dim=1)
    return [part.reshape(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _heads_apart(x_BNTD: Tensor, ranks: int) -> Tensor:
    """[ranks, B, heads of one, T, D]."""
    heads = x_BNTD.shape[1]
    if heads % ranks == 0:
        apart: Tensor = x_BNTD.unflatten(1, (ranks, -1)).transpose(0, 1)
        return apart
    return torch.stack([x_BNTD[:, heads_of(heads, ranks, rank)] for rank in range(ranks)])


def _join_heads(x: Tensor) -> Tensor:
    """[B, heads, T, D] of [ranks, B, heads of one, T, D]."""
    return x.transpose(0, 1).flatten(1, 2)


def _sum_heads(x: Tensor, heads: int) -> Tensor:
    """The same, the terms of a head that several ranks share added up, in float32 or wider."""
    joined = _join_heads(x)
    if joined.shape[1] == heads:
        return joined
    exact = torch.promote_types(x.dtype, torch.float32)
    summed: Tensor = joined.unflatten(1, (heads, -1)).sum(dim=2, dtype=exact)
    return summed.to(x.dtype)


def _positions_apart(x_BNTD: Tensor, chunks: int, ranks: int) -> Tensor:
    """[ranks, B, N, positions of one, D]: of each chunk a part."""
    apart: Tensor = x_BNTD.unflatten(2, (chunks, ranks, -1)).movedim(3, 0).flatten(3, 4)
    return apart


def _join_positions(x: Tensor, chunks: int) -> Tensor:
    """[B, N, T, D] of [ranks, B, N, positions of one, D]."""
    joined: Tensor = x.unflatten(3, (chunks, -1)).movedim(0, 3).flatten(2, 4)
    return joined
