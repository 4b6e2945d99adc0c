"""Cross-entropy from hidden states, without ever holding all the logits.

The rows are taken a chunk at a time: logits, loss, and at once the gradients of the hidden states and of the output
matrix, so that the backward pass only scales them. A chunk is ``CHUNK`` logits, or as many as the output matrix has
elements if that is more; three times a chunk exist at any moment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.model.linear import scaled_gradient

IGNORED = -100
"""The label of a position that does not count."""

CHUNK = 1 << 22


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum of −log softmax(x·weightᵀ)[label] over the rows whose label is not ``IGNORED``.

    ``x`` is [rows, hidden], ``weight`` [vocabulary, hidden], ``labels`` int64 [rows]; the result is a scalar of the
    dtype of ``x``, or float32 if that is wider.
    """
    # Inside a Function autograd is always off, so whether gradients are wanted must be asked here.
    total: Tensor = _LinearCrossEntropy.apply(x, weight, labels, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return total


def chunk_rows(rows: int, vocabulary: int, hidden: int) -> int:
    """How many of ``rows`` rows to take at a time."""
    return max(1, CHUNK // vocabulary, min(rows, hidden))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, training: bool) -> Tensor:
        needs_x, needs_weight = (needed and training for needed in ctx.needs_input_grad[:2])
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        if grad_weight is not None and len(x) == 0:
            grad_weight.zero_()
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        rows = chunk_rows(len(x), *weight.shape)
        for start in range(0, len(x), rows):
            chunk = slice(start, start + rows)
            x_chunk, label = x[chunk], labels[chunk]
            log_p = torch.log_softmax(x_chunk @ weight.t(), dim=-1)
            counted = label != IGNORED
            picked = label.where(counted, 0)[:, None]
            total -= log_p.gather(1, picked)[:, 0].masked_fill(~counted, 0.0).sum()
            if grad_x is None and grad_weight is None:
                continue
            # In place: the softmax, less one at the label, and zero where nothing counts.
            grad_logits = log_p.exp_()
            grad_logits.scatter_add_(1, picked, grad_logits.new_full(picked.shape, -1.0))
            grad_logits.masked_fill_(~counted[:, None], 0.0)
            if grad_x is not None:
                torch.mm(grad_logits, weight, out=grad_x[chunk])
            if grad_weight is not None:
                torch.addmm(grad_weight, grad_logits.t(), x_chunk, beta=int(start > 0), out=grad_weight)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight = weight
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        # The saved gradients belong to this node alone and are used once, so they may be scaled where they lie.
        return (
            None if grad_x is None else grad_x.mul_(grad),
            None if grad_weight is None else scaled_gradient(ctx.weight, grad_weight, grad),
            None,
            None,
        )
