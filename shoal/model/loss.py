"""Cross-entropy from hidden states, without ever holding all the logits.

The rows are taken a chunk at a time: logits, loss, and at once the gradients of the hidden states and of the output
matrix, so that the backward pass only scales them. A chunk is ``CHUNK`` logits, or as many as the output matrix has
elements if that is more; two of them exist at any moment. What several chunks add to the gradient of the output matrix
adds up in float32 at least, as everything that adds up does.

With a z-loss (Chowdhery et al. 2022) each row's loss has a multiple of log²Z more, Z = Σ exp(logits), which holds the
logits near those of a normalised distribution: d log²Z / d logits = 2 log Z · softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.meter import mark
from shoal.model.linear import scaled_gradient
from shoal.purposes import GRADIENTS, LOGITS

IGNORED = -100
"""The label of a position that does not count."""

CHUNK = 1 << 22


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    """The sum of −log softmax(x·weightᵀ)[label] + ``z_loss`` · log²Z over the rows whose label is not ``IGNORED``.

    ``x`` is [rows, hidden], ``weight`` [vocabulary, hidden], ``labels`` int64 [rows]; the result is a scalar of the
    dtype of ``x``, or float32 if that is wider.
    """
    # Inside a Function autograd is always off, so whether gradients are wanted must be asked here.
    total: Tensor = _LinearCrossEntropy.apply(x, weight, labels, z_loss, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return total


class LinearCrossEntropy(nn.Module):
    """The summed loss of hidden states [B, T, H] under an output matrix [vocabulary, H] and labels [B, T].

    The z-loss is there where gradients are made: an evaluation is the plain cross-entropy.
    """

    def __init__(self, z_loss: float = 0.0) -> None:
        super().__init__()
        self.z_loss = z_loss

    def forward(self, x_BTH: Tensor, weight: Tensor, labels_BT: Tensor) -> Tensor:
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0
        return linear_cross_entropy(x_BTH.flatten(0, 1), weight, labels_BT.flatten(), z_loss)


def chunk_rows(rows: int, vocabulary: int, hidden: int) -> int:
    """How many of ``rows`` rows to take at a time."""
    return max(1, CHUNK // vocabulary, min(rows, hidden))


def new_gradient(weight: Tensor, chunk: int, rows: int) -> Tensor:
    """Room for the gradient of the output matrix, made of ``rows`` rows a ``chunk`` at a time; zero for no rows."""
    dtype = weight.dtype if rows <= chunk else torch.promote_types(weight.dtype, torch.float32)
    made = torch.empty_like(weight, dtype=dtype) if rows else torch.zeros_like(weight)
    mark(GRADIENTS, made)
    return made


def add_chunk(grad_weight: Tensor, grad_logits: Tensor, x: Tensor, *, first: bool) -> None:
    """Add grad_logitsᵀ·x to what earlier chunks have left; the first finds anything there."""
    if grad_weight.dtype == x.dtype:
        torch.addmm(grad_weight, grad_logits.t(), x, beta=int(not first), out=grad_weight)
    elif first:
        grad_weight.copy_(grad_logits.t() @ x)
    else:
        grad_weight.add_(grad_logits.t() @ x)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, z_loss: float, training: bool) -> Tensor:
        needs_x, needs_weight = (needed and training for needed in ctx.needs_input_grad[:2])
        grad_x = torch.empty_like(x) if needs_x else None
        exact = torch.promote_types(x.dtype, torch.float32)
        total = x.new_zeros((), dtype=exact)
        rows = chunk_rows(len(x), *weight.shape)
        grad_weight = new_gradient(weight, rows, len(x)) if needs_weight else None
        for start in range(0, len(x), rows):
            chunk = slice(start, start + rows)
            x_chunk, label = x[chunk], labels[chunk]
            counted = label != IGNORED
            picked = label.where(counted, 0)[:, None]
            logits = x_chunk @ weight.t()
            mark(LOGITS, logits)
            labelled = logits.gather(1, picked)
            log_p = torch.log_softmax(logits, dim=-1, dtype=exact)
            mark(LOGITS, log_p)
            del logits
            losses = -log_p.gather(1, picked)
            log_z = labelled + losses
            if z_loss:
                losses += z_loss * log_z.square()
            total += losses.masked_fill_(~counted[:, None], 0.0).sum()
            if grad_x is None and grad_weight is None:
                continue
            # In place: the gradient of log Z, less one at the label, and zero where nothing counts.
            grad_logits = log_p.exp_()
            del log_p
            if z_loss:
                grad_logits *= 1.0 + 2.0 * z_loss * log_z
            grad_logits.scatter_add_(1, picked, grad_logits.new_full(picked.shape, -1.0))
            grad_logits = grad_logits.masked_fill_(~counted[:, None], 0.0).to(x.dtype)
            mark(LOGITS, grad_logits)
            if grad_x is not None:
                torch.mm(grad_logits, weight, out=grad_x[chunk])
            if grad_weight is not None:
                add_chunk(grad_weight, grad_logits, x_chunk, first=start == 0)
            del grad_logits
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight = weight
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        # The saved gradients belong to this node alone and are used once, so they may be scaled where they lie.
        return (
            None if grad_x is None else grad_x.mul_(grad),
            None if grad_weight is None else scaled_gradient(ctx.weight, grad_weight, grad),
            *(None,) * 3,
        )
