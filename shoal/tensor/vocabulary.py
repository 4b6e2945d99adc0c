"""Embedding, logits and loss with the rows of the vocabulary divided over ranks (Shoeybi et al. 2019).

For a softmax over the vocabulary no rank needs another's logits: per position ranks exchange their largest logit, their
sum of exponentials relative to it, and the label's logit from the one that has it.

Axes in names: B samples, T positions, S this rank's positions, H hidden, V this rank's rows of the vocabulary; M rows
of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import start_all_gather
from shoal.comm.differentiable import Arriving, joined, part_size
from shoal.comm.world import Group
from shoal.layout.kinds import split_evenly
from shoal.model.linear import scaled_gradient
from shoal.model.loss import IGNORED, add_chunk, chunk_rows, new_gradient
from shoal.tensor.linear import ColumnLinear
from shoal.tensor.stream import PURPOSE, FullSizes, Stream


class VocabularyEmbedding(nn.Module):
    """The rows of ``table`` that this rank has; tokens [B, T] to the stream [B, S, H]."""

    def __init__(self, table: nn.Embedding, stream: Stream, sizes: FullSizes) -> None:
        super().__init__()
        self.weight = table.weight
        self.stream, self.sizes = stream, sizes

    def forward(self, tokens_BT: Tensor) -> Tensor:
        self.sizes.positions = tokens_BT.shape[1]
        row, mine = _rows_here(tokens_BT, self.weight, self.sizes, self.stream.group)
        found = F.embedding(row, self.weight).masked_fill_(~mine[..., None], 0.0)
        return self.stream.leave(found)


class VocabularyHead(ColumnLinear):
    """The rows of an output matrix that this rank has; the stream [B, S, H] to all logits [B, T, vocabulary] on every
    rank."""

    def __init__(self, linear: nn.Linear, stream: Stream, sizes: FullSizes) -> None:
        super().__init__(linear, stream)
        self.sizes = sizes

    def forward(self, x_BSH: Tensor) -> Tensor:
        group = self.stream.group
        return joined(self.columns(x_BSH), -1, split_evenly(self.sizes.vocabulary, group.size), group, PURPOSE)


class VocabularyCrossEntropy(nn.Module):
    """The summed loss, the same on every rank, of the stream [B, S, H] under the rows of an output matrix that this
    rank has, and labels [B, T].

    As in :mod:`shoal.model.loss`, gradients are made in the forward pass, a chunk of rows at a time, and the z-loss is
    there where gradients are made.
    """

    def __init__(self, stream: Stream, sizes: FullSizes, z_loss: float = 0.0) -> None:
        super().__init__()
        self.stream, self.sizes, self.z_loss = stream, sizes, z_loss

    def forward(self, x_BSH: Tensor, weight: Tensor, labels_BT: Tensor) -> Tensor:
        # Inside a Function autograd is always off, so whether gradients are wanted must be asked here.
        training = torch.is_grad_enabled()
        arguments = (self.stream, self.sizes, self.z_loss if training else 0.0, training)
        total: Tensor = _CrossEntropy.apply(x_BSH, weight, labels_BT, *arguments)  # type: ignore[no-untyped-call]
        return total


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSH: Tensor,
        weight_VH: Tensor,
        labels_BT: Tensor,
        stream: Stream,
        sizes: FullSizes,
        z_loss: float,
        training: bool,
    ) -> Tensor:
        needs_x, needs_weight = (needed and training for needed in ctx.needs_input_grad[:2])
        x, labels = x_BSH.reshape(1, -1, x_BSH.shape[-1]), stream.by_part(labels_BT)
        grad_x = torch.empty_like(x) if needs_x else None
        total = x.new_zeros((), dtype=_exact(x.dtype))
        chunks = _chunks(x.shape[1], stream, sizes.vocabulary, x.shape[2])
        grad_weight = new_gradient(weight_VH, chunks[0].stop, x.shape[1]) if needs_weight else None
        space = x.new_empty((chunks[0].stop * stream.parts, weight_VH.shape[0]))
        arriving = _start_enter(x, chunks[0], stream)
        leaving: list[tuple[slice, Arriving]] = []
        for number, chunk in enumerate(chunks):
            x_MH = arriving.wait()[0]
            if number + 1 < len(chunks):
                arriving = _start_enter(x, chunks[number + 1], stream)
            label = labels[:, chunk].flatten()
            row, mine = _rows_here(label, weight_VH, sizes, stream.group)
            logits_MV = torch.mm(x_MH, weight_VH.t(), out=space[: len(x_MH)])
            losses, log_z, scale = _exponentials(logits_MV, row, mine, stream.group)
            if z_loss:
                losses += z_loss * log_z.square()
                scale *= 1.0 + 2.0 * z_loss * log_z
            total += losses.masked_fill(label == IGNORED, 0.0).sum()
            if grad_x is None and grad_weight is None:
                continue
            # In place: the gradient of log Z, less one at the label, and zero where nothing counts.
            logits_MV.mul_(scale.masked_fill(label == IGNORED, 0.0)[:, None])
            logits_MV.scatter_add_(1, row[:, None], mine[:, None].to(logits_MV.dtype).neg_())
            if grad_x is not None:
                _land(leaving, grad_x)
                leaving.append((chunk, stream.start_leave((logits_MV @ weight_VH)[None])))
            if grad_weight is not None:
                add_chunk(grad_weight, logits_MV, x_MH, first=number == 0)
        if grad_x is not None:
            _land(leaving, grad_x)
            grad_x = grad_x.view(x_BSH.shape)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight = weight_VH
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        # The saved gradients belong to this node alone and are used once, so they may be scaled where they lie.
        return (
            None if grad_x is None else grad_x.mul_(grad),
            None if grad_weight is None else scaled_gradient(ctx.weight, grad_weight, grad),
            *(None,) * 5,
        )


def _chunks(rows: int, stream: Stream, vocabulary: int, hidden: int) -> list[slice]:
    """Which of this rank's ``rows`` to take at a time, the same on all ranks; the others' come with them."""
    most = part_size(vocabulary, stream.group.size)
    step = max(1, chunk_rows(rows * stream.parts, most, hidden) // stream.parts)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _start_enter(x: Tensor, chunk: slice, stream: Stream) -> Arriving:
    return stream.start_enter(x[:, chunk], (chunk.stop - chunk.start) * stream.parts)


def _land(leaving: list[tuple[slice, Arriving]], grad_x: Tensor) -> None:
    """Put what is under way in its place."""
    for chunk, arriving in leaving:
        grad_x[:, chunk] = arriving.wait()
    leaving.clear()


def _exponentials(logits_MV: Tensor, row: Tensor, mine: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Turns logits in place into exponentials; returns each row's loss [M], the logarithm [M] of what its exponentials
    would sum to, and the factor [M] that makes them its softmax.

    The exponentials are relative to this rank's largest logit; the ranks' sums are then brought to the largest of all.
    """
    top = logits_MV.amax(1)
    picked = logits_MV.gather(1, row[:, None])[:, 0].masked_fill(~mine, 0.0)
    exact = _exact(logits_MV.dtype)
    powers = logits_MV.sub_(top[:, None]).exp_().sum(1, dtype=exact)
    own = torch.stack((top.to(exact), powers, picked.to(exact)))
    ranks = own.new_empty((group.size, *own.shape))
    start_all_gather(ranks.view(-1), own, group, PURPOSE).wait()
    tops, sums, labelled = ranks.unbind(1)
    top = tops.amax(0)
    shares = (tops - top).exp()
    total = (sums * shares).sum(0)
    log_total = total.log()
    return (top - labelled.sum(0)) + log_total, top + log_total, shares[group.index] / total


def _rows_here(tokens: Tensor, weight_VH: Tensor, sizes: FullSizes, group: Group) -> tuple[Tensor, Tensor]:
    """For each token its row of this rank's matrix, 0 if it has none there, and whether it has one."""
    rows = split_evenly(sizes.vocabulary, group.size)
    assert rows[group.index] == weight_VH.shape[0], f"{weight_VH.shape[0]} rows here of {sizes.vocabulary} in all"
    row = tokens - sum(rows[: group.index])
    mine = (row >= 0) & (row < rows[group.index])
    return row.where(mine, 0), mine


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What sums over the vocabulary are made in."""
    return torch.promote_types(dtype, torch.float32)
