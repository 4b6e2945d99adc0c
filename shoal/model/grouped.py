"""The feed-forwards of several experts on rows that are sorted by expert.

Products of groups: rows of one group are multiplied by its own matrix. On a GPU that is one kernel
(``torch._grouped_mm``, for bfloat16); elsewhere a product a group, into its part of the result, which on a CPU is as
fast as one product of all rows.

Kept for the backward pass are the rows and what gate and up make of them; what the activation makes is made again. The
weight gradients of all experts are one tensor, zero where an expert had no rows, and can be made later
(:mod:`shoal.model.linear`).

Axes in names: M rows, E experts, H hidden, F columns of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.model.linear import later, whole_gradient

Activation = Callable[[Tensor], Tensor]


def expert_outputs(
    x_MH: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int], activation: Activation
) -> Tensor:
    """down_e(activation(gate_e(x)) · up_e(x)) of the first ``counts[0]`` rows by expert 0, and so on: [M, H].

    ``gate_up`` is [E·2F, H], of each expert first the gate, ``down`` [E·H, F].
    """
    y: Tensor = _ExpertOutputs.apply(x_MH, gate_up, down, counts, activation)  # type: ignore[no-untyped-call]
    return y


def grouped(x: Tensor, weight: Tensor, counts: Sequence[int], *, back: bool = False) -> Tensor:
    """x·W_eᵀ [M, out] of rows by expert and their matrices ``weight`` [E·out, in]; ``back``: x·W_e [M, in]."""
    matrices = weight.unflatten(0, (len(counts), -1))
    if not back:
        matrices = matrices.transpose(1, 2)
    if one_kernel(x):
        return torch._grouped_mm(x, matrices, offs=_ends(counts, x.device))
    out = x.new_empty(len(x), matrices.shape[2])
    for rows, into, matrix in zip(x.split(list(counts)), out.split(list(counts)), matrices, strict=True):
        torch.mm(rows, matrix, out=into)
    return out


def grouped_weight_gradient(grad: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """gradᵀ·x of the rows of each expert, [E·out, in]: zero for one without rows."""
    if one_kernel(x):
        return torch._grouped_mm(grad.t(), x, offs=_ends(counts, x.device)).flatten(0, 1)
    out = x.new_empty(len(counts), grad.shape[1], x.shape[1])
    for left, right, into in zip(grad.split(list(counts)), x.split(list(counts)), out, strict=True):
        torch.mm(left.t(), right, out=into)
    return out.flatten(0, 1)


def one_kernel(x: Tensor) -> bool:
    """Whether the backend multiplies groups at once."""
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0 and x.shape[1] % 8 == 0


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


class _ExpertOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int], activation: Activation
    ) -> Tensor:
        made = grouped(x, gate_up, counts)
        ctx.save_for_backward(x, made)
        ctx.weights, ctx.counts, ctx.activation = (gate_up, down), counts, activation
        return grouped(_activated(made, activation), down, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, made = ctx.saved_tensors
        (gate_up, down), counts = ctx.weights, ctx.counts
        needs_x, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        with torch.enable_grad():
            leaf = made.detach().requires_grad_()
            inner = _activated(leaf, ctx.activation)
        (grad_made,) = torch.autograd.grad(inner, leaf, grouped(grad, down, counts, back=True))
        grad_down = _weight_gradient(down, grad, inner.detach(), counts) if needs_down else None
        del inner, leaf
        grad_x = grouped(grad_made, gate_up, counts, back=True) if needs_x else None
        grad_gate_up = _weight_gradient(gate_up, grad_made, x, counts) if needs_gate_up else None
        return grad_x, grad_gate_up, grad_down, None, None


def _activated(made: Tensor, activation: Activation) -> Tensor:
    gate, up = made.chunk(2, dim=-1)
    return activation(gate) * up


def _weight_gradient(weight: Tensor, grad: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor | None:
    """None where the weight's sink has taken it, or will."""
    if later(weight, partial(_enter, weight, grad, x, counts)):
        return None
    return whole_gradient(weight, grouped_weight_gradient(grad, x, counts))


def _enter(weight: Tensor, grad: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    whole_gradient(weight, grouped_weight_gradient(grad, x, counts))
