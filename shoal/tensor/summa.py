"""A linear map on a square of ranks, a block at a time (SUMMA, van de Geijn & Watts 1997; Optimus, Xu et al. 2021).

Of Y = X·Wᵀ, rank (i, j) of q×q has the block of X with samples i and features j, that of the weight with out-features j
and in-features i, and that of Y with samples i and out-features j. Forward, step t brings it features t of its samples
across its row, in-features t of its out-features down its column, and adds their product:

    Y = Σₜ Xₜ·Wₜᵀ        dXₜ = Σⱼ dY·Wₜ, over a row        dWₜ = Σᵢ dYᵀ·Xₜ, over a column

Backward, step t brings Wₜ, later Xₜ, once more, and sums the product onto the rank that has that block. Gathering the
blocks for one product moves the same words, in fewer messages, but holds q blocks of X and of W at a time. Here there
are two, however large q is: one that is multiplied and one that is on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import Pending, start_broadcast, start_reduce
from shoal.comm.differentiable import Arriving
from shoal.comm.world import Group
from shoal.meter import mark
from shoal.model.linear import later, whole_gradient
from shoal.purposes import COMMUNICATION
from shoal.tensor.ports import PURPOSE


def summa(
    x: Tensor, weight: Tensor, bias: Tensor | None, across: Group, down: Group, widths: tuple[int, ...]
) -> Tensor:
    """This rank's block of Y [..., N_j], of its blocks of X [..., K_j], the weight [N_j, K_i] and the bias [N_j].

    ``across`` are the q ranks of this row of the grid, this one at place j; ``down`` the q ranks of this column, this
    one at place i. ``widths`` are the K_t, which may differ and be 0. Ranks of a row have the same samples; the
    gradient of the bias, which every row has, is that of these. What needs a gradient does on all ranks or on none.
    """
    assert across.size == down.size == len(widths), f"{down.size}×{across.size} ranks for {len(widths)} blocks"
    y: Tensor = _Summa.apply(x, weight, bias, across, down, widths)  # type: ignore[no-untyped-call]
    return y


class _Summa(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        across: Group,
        down: Group,
        widths: tuple[int, ...],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.grid = weight, (across, down, widths)
        rows = x.flatten(0, -2).contiguous()

        def start(t: int) -> tuple[Arriving[Tensor], ...]:
            return _start_block(rows, t, widths, across), _start_block(weight, t, widths, down)

        # In half precision each of the q terms would round the sum once more.
        exact = torch.promote_types(x.dtype, torch.float32)
        y = rows.new_zeros(rows.shape[0], weight.shape[0], dtype=exact)
        coming = start(0)
        for t in range(len(widths)):
            x_t, w_t = (block.wait() for block in coming)
            coming = start(t + 1) if t + 1 < len(widths) else ()
            if exact == x.dtype:
                y.addmm_(x_t, w_t.t())
            else:
                y.add_(x_t @ w_t.t())
        if bias is not None:
            y.add_(bias)
        return y.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        across, down, widths = ctx.grid
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        products = []
        if needs_x:
            products.append(_Product(rows, ctx.weight, brought=down, summed=across))
        of_weight = _Product(rows.t(), x.flatten(0, -2).contiguous(), brought=across, summed=down)
        needs_weight = needs_weight and not later(ctx.weight, partial(_later, ctx.weight, of_weight, widths))
        if needs_weight:
            products.append(of_weight)
        grads = iter(_sums(products, widths))
        grad_x = next(grads).view(x.shape) if needs_x else None
        grad_weight = whole_gradient(ctx.weight, next(grads)) if needs_weight else None
        grad_bias = rows.sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None


@dataclass(frozen=True)
class _Product:
    """``left`` times each rank's ``own`` over ``brought``, the products summed over ``summed``: number t on rank t."""

    left: Tensor
    own: Tensor
    brought: Group
    summed: Group


def _later(weight: Tensor, product: _Product, widths: Sequence[int]) -> None:
    whole_gradient(weight, *_sums([product], widths))


def _sums(products: Sequence[_Product], widths: Sequence[int]) -> list[Tensor]:
    """This rank's sum of each of ``products``.

    While a step multiplies, the block of the next step is on its way here and the product of the last one to its sum.
    """
    steps = (
        (product, t, _start_block(product.own, t, widths, product.brought))
        for product in products
        for t in range(len(widths))
    )
    found, summing, step = [], Pending(None), next(steps, None)
    while step:
        product, t, coming = step
        block = coming.wait()
        step = next(steps, None)
        term = product.left @ block
        summing.wait()
        summing = start_reduce(term, product.summed, PURPOSE, t)
        if product.summed.index == t:
            found.append(term)
    summing.wait()
    return found


def _start_block(own: Tensor, t: int, widths: Sequence[int], group: Group) -> Arriving[Tensor]:
    """Begin to bring the ranks of ``group`` the block [rows, widths[t]] of the one at place ``t``, its ``own``."""
    block = own
    if group.index != t:
        block = own.new_empty((own.shape[0], widths[t]))
        mark(COMMUNICATION, block)
    return Arriving(start_broadcast(block, group, PURPOSE, t), lambda: block)
