"""Attention over keys and values that are gathered from all ranks (as Llama 3 was trained).

Every rank has the keys and values of all while it works on them, and fetches them once more for the backward pass;
nothing else goes on meanwhile. Their gradients are summed, and divided again, in float32 or wider.

Words that a rank receives, of S positions over P ranks, w elements of a key and a value together: (P − 1)/P·S·w
forward, twice that backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import start_all_gather, start_reduce_scatter
from shoal.comm.world import Group
from shoal.context.blocks import Result, Saved, attend, attend_backward
from shoal.context.plan import Plan
from shoal.context.ring import PURPOSE
from shoal.meter import mark
from shoal.purposes import COMMUNICATION


def gathered_attention(q_BKGQD: Tensor, k_BKQD: Tensor, v_BKQD: Tensor, plan: Plan, group: Group) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks of ``group``, [B, K, G, Q, D]."""
    out: Tensor = _Gathered.apply(q_BKGQD, k_BKQD, v_BKQD, plan, group)  # type: ignore[no-untyped-call]
    return out


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group) -> Tensor:
        kv, result = torch.stack((k, v)), Result.of_nothing(q)
        for there, blocks in zip(_gather(kv, group), plan.blocks, strict=True):
            for block in blocks:
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
        all_kv = _gather(kv, group)
        found = torch.zeros_like(all_kv, dtype=exact)
        mark(COMMUNICATION, found)
        for there, gradients, blocks in zip(all_kv, found, plan.blocks, strict=True):
            for block in blocks:
                attend_backward(saved, there, block, plan.sight, dq, gradients)
        home = torch.empty_like(kv, dtype=exact)
        start_reduce_scatter(home, found.view(-1), group, PURPOSE).wait()
        dk, dv = home.to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _gather(kv: Tensor, group: Group) -> Tensor:
    """The ``kv`` of all ranks, [ranks, 2, B, K, Q, D]."""
    everyone = kv.new_empty((group.size, *kv.shape))
    mark(COMMUNICATION, everyone)
    start_all_gather(everyone.view(-1), kv, group, PURPOSE).wait()
    return everyone
