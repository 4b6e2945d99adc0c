"""The feed-forwards of several experts on rows that are sorted by expert.

Products of groups: rows of one group are multiplied by its own matrix. On a GPU that is one kernel
(``torch.nn.functional.grouped_mm``). A CPU has none that is faster than a product a group; and there an expert is taken
through all of its steps before the next one begins, so that what one step leaves in the cache the next one finds.

Kept for the backward pass are the rows and what gate and up make of them; what the activation makes is made again. The
weight gradients of all experts are one tensor, zero where an expert had no rows, and can be made later
(:mod:`shoal.model.linear`).

Axes in names: M rows, E experts, H hidden, F columns of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.model.activations import Activation
from shoal.model.linear import later, whole_gradient


def expert_outputs(
    x_MH: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int], activation: Activation
) -> Tensor:
    """down_e(activation(gate_e(x)) · up_e(x)) of the first ``counts[0]`` rows by expert 0, and so on: [M, H].

    ``gate_up`` is [E·2F, H], of each expert first the gate, ``down`` [E·H, F].
    """
    y: Tensor = _ExpertOutputs.apply(x_MH, gate_up, down, counts, activation)  # type: ignore[no-untyped-call]
    return y


class _ExpertOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int], activation: Activation
    ) -> Tensor:
        made, y = x.new_empty(len(x), len(gate_up) // len(counts)), x.new_empty(len(x), len(down) // len(counts))
        for rows, each, matrices in _turns(counts, x, gate_up, down):
            (to_made, to_y), inner = matrices, x.new_empty(rows.stop - rows.start, down.shape[1])
            products(x[rows], to_made.transpose(-1, -2), each, made[rows])
            gate, up = made[rows].chunk(2, dim=-1)
            activation.into(gate, inner)
            products(inner.mul_(up), to_y.transpose(-1, -2), each, y[rows])
        ctx.save_for_backward(x, made)
        ctx.weights, ctx.counts, ctx.activation = (gate_up, down), counts, activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, made = ctx.saved_tensors
        (gate_up, down), counts, activation = ctx.weights, ctx.counts, ctx.activation
        needs_x, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        grad_x = torch.empty_like(x) if needs_x else None
        grad_made, inner = torch.empty_like(made), x.new_empty(len(x), down.shape[1])
        for rows, each, (to_made, to_y) in _turns(counts, x, gate_up, down):
            gate, up = made[rows].chunk(2, dim=-1)
            grad_gate, grad_up = grad_made[rows].chunk(2, dim=-1)
            grad_inner = torch.empty_like(inner[rows])
            products(grad[rows], to_y, each, grad_inner)
            activation.into(gate, inner[rows])
            torch.mul(grad_inner, inner[rows], out=grad_up)
            activation.back_into(grad_inner.mul_(up), gate, grad_gate)
            inner[rows].mul_(up)
            if grad_x is not None:
                products(grad_made[rows], to_made, each, grad_x[rows])
        grad_down = _weight_gradient(down, grad, inner, counts) if needs_down else None
        grad_gate_up = _weight_gradient(gate_up, grad_made, x, counts) if needs_gate_up else None
        return grad_x, grad_gate_up, grad_down, None, None


_Turn = tuple[slice, Sequence[int], tuple[Tensor, ...]]


def _turns(counts: Sequence[int], x: Tensor, *weights: Tensor) -> list[_Turn]:
    """What is taken at a time: rows, how many of each expert, and these experts' matrices [experts, out, in]."""
    matrices = [weight.unflatten(0, (len(counts), -1)) for weight in weights]
    if at_once(x):
        return [(slice(0, len(x)), counts, tuple(matrices))]
    found: list[_Turn] = []
    start = 0
    for count, *each in zip(counts, *matrices, strict=True):
        if count:
            found.append((slice(start, start + count), (count,), tuple(one[None] for one in each)))
        start += count
    return found


def at_once(x: Tensor) -> bool:
    """Whether groups are multiplied at once."""
    return x.is_cuda and len(x) > 0


def products(x: Tensor, matrices: Tensor, counts: Sequence[int], out: Tensor) -> None:
    """Write x·A_e of the rows of each expert, and their ``matrices`` [experts, in, out], to ``out``."""
    if len(counts) == 1:
        torch.mm(x, matrices[0], out=out)
    else:
        out.copy_(F.grouped_mm(x, matrices, offs=_ends(counts, x.device)))


def weight_gradients(grad: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """gradᵀ·x of the rows of each expert, [E·out, in]: zero for one without rows."""
    if at_once(x):
        made: Tensor = F.grouped_mm(grad.t(), x, offs=_ends(counts, x.device))
        return made.flatten(0, 1)
    out = x.new_empty(len(counts), grad.shape[1], x.shape[1])
    for left, right, into in zip(grad.split(list(counts)), x.split(list(counts)), out, strict=True):
        torch.mm(left.t(), right, out=into)
    return out.flatten(0, 1)


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _weight_gradient(weight: Tensor, grad: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor | None:
    """None where the weight's sink has taken it, or will."""
    if later(weight, partial(_enter, weight, grad, x, counts)):
        return None
    return whole_gradient(weight, weight_gradients(grad, x, counts))


def _enter(weight: Tensor, grad: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    whole_gradient(weight, weight_gradients(grad, x, counts))
