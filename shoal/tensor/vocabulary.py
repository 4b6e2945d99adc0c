"""Embedding, logits and loss with the rows of the vocabulary divided over ranks (Shoeybi et al. 2019), and on grids of
several dimensions its hidden columns over others.

For a softmax over the vocabulary no rank needs another's logits: per position ranks exchange their largest logit, their
sum of exponentials relative to it, and the label's logit from the one that has it. How hidden states and matrix reach
the product, and how its terms become logits, is a linear's business (:mod:`shoal.tensor.ports`).

Axes in names: B samples, T positions, S this rank's positions, H hidden, V this rank's rows of the vocabulary; M rows
of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from shoal.meter import mark
from shoal.model.linear import scaled_gradient
from shoal.model.loss import IGNORED, add_chunk, chunk_rows, new_gradient
from shoal.purposes import LOGITS
from shoal.tensor.linear import DividedLinear, divided_linear
from shoal.tensor.ports import PURPOSE, Extent, Port, Ports, Positions, Still, by_part, entered, left
from shoal.tensor.samples import Samples


@dataclass(frozen=True)
class Vocabulary:
    """``size`` rows, divided over ``group``."""

    size: int
    group: Group

    @property
    def rows(self) -> Sequence[int]:
        """How many each rank has."""
        return split_evenly(self.size, self.group.size)

    def find(self, tokens: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
        """For each token its row of this rank's matrix, 0 if it has none there, and whether it has one."""
        rows, at = self.rows, self.group.index
        assert rows[at] == weight_VH.shape[0], f"{weight_VH.shape[0]} rows here of {self.size} in all"
        row = tokens - sum(rows[:at])
        mine = (row >= 0) & (row < rows[at])
        return row.where(mine, 0), mine


class VocabularyEmbedding(nn.Module):
    """This rank's block of ``table``; all tokens [B, T] to its block of the stream."""

    def __init__(self, table: nn.Embedding, ports: Ports, vocabulary: Vocabulary, samples: Samples) -> None:
        super().__init__()
        self.weight = table.weight
        self.ports, self.vocabulary, self.samples = ports, vocabulary, samples

    def forward(self, tokens_BT: Tensor) -> Tensor:
        row, mine = self.vocabulary.find(self.samples.of(tokens_BT), self.weight)
        found = F.embedding(row, entered(self.weight, self.ports.weight)).masked_fill_(~mine[..., None], 0.0)
        return left(found, self.ports.x)


class VocabularyHead(DividedLinear):
    """This rank's block of an output matrix; its block of the stream to all logits [B, T, vocabulary] on every rank,
    of B samples that are divided over ``rows``; or, from one position of the stream on each rank, to those
    [B, 1, vocabulary] of the newest, as ``extent`` tells."""

    def __init__(self, linear: nn.Linear, ports: Ports, vocabulary: Vocabulary, rows: Group, extent: Extent) -> None:
        super().__init__(linear, ports)
        self.vocabulary, self.rows, self.extent = vocabulary, rows, extent

    def forward(self, x: Tensor) -> Tensor:
        ports = self.ports
        if self.extent.newest and isinstance(ports.x, Positions):
            x, ports = ports.x.newest(x), replace(ports, x=Still())
        logits = divided_linear(x, self.weight, self.bias, ports)
        size, samples = len(logits), self.extent.samples
        sizes = [min(size, max(0, samples - size * at)) for at in range(self.rows.size)]  # without those that pad
        logits = logits[: sizes[self.rows.index]]
        logits = joined(logits, -1, self.vocabulary.rows, self.vocabulary.group, PURPOSE)
        return joined(logits, 0, sizes, self.rows, PURPOSE)


class VocabularyCrossEntropy(nn.Module):
    """The summed loss of some rows of the logits, from this rank's block of the stream, its block of an output matrix,
    and the labels [B, T] of its samples. Which rows these are, ``ports`` say: all that ``x`` gathers, or, where the
    terms of logits leave, this rank's part of them. Ranks that differ in their part of the vocabulary alone have the
    same loss.

    As in :mod:`shoal.model.loss`, gradients are made in the forward pass, a chunk of rows at a time, and the z-loss is
    there where gradients are made.
    """

    def __init__(self, ports: Ports, vocabulary: Vocabulary, z_loss: float = 0.0) -> None:
        super().__init__()
        self.ports, self.vocabulary, self.z_loss = ports, vocabulary, z_loss

    def forward(self, x: Tensor, weight: Tensor, labels_BT: Tensor) -> Tensor:
        # Inside a Function autograd is always off, so whether gradients are wanted must be asked here.
        training = torch.is_grad_enabled()
        arguments = (self.ports, self.vocabulary, self.z_loss if training else 0.0, training)
        total: Tensor = _CrossEntropy.apply(x, weight, labels_BT, *arguments)  # type: ignore[no-untyped-call]
        return total


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSH: Tensor,
        weight: Tensor,
        labels_BT: Tensor,
        ports: Ports,
        vocabulary: Vocabulary,
        z_loss: float,
        training: bool,
    ) -> Tensor:
        needs_x, needs_weight = (needed and training for needed in ctx.needs_input_grad[:2])
        entering_weight = ports.weight.start_enter(weight, ports.weight.full(weight))
        x = x_BSH.reshape(1, -1, x_BSH.shape[-1])
        parts = ports.x.parts if ports.x.dim == 1 else 1  # in which the rows lie on different ranks
        labels = by_part(labels_BT, parts, IGNORED)
        grad_x = torch.empty_like(x) if needs_x else None
        total = x.new_zeros((), dtype=_exact(x.dtype))
        weight_VH = entering_weight.wait()
        chunks = _chunks(x.shape[1], parts, part_size(vocabulary.size, vocabulary.group.size), weight_VH.shape[1])
        grad_weight = new_gradient(weight_VH, chunks[0].stop, x.shape[1]) if needs_weight else None
        space = x.new_empty((chunks[0].stop * parts, weight_VH.shape[0]))
        mark(LOGITS, space)
        arriving = _start_enter(x, chunks[0], ports.x)
        leaving: list[tuple[slice, Arriving[Tensor]]] = []
        for number, chunk in enumerate(chunks):
            x_MH = arriving.wait()[0]
            if number + 1 < len(chunks):
                arriving = _start_enter(x, chunks[number + 1], ports.x)
            label = labels[:, chunk].reshape(1, -1)
            # Rows that do not count have logits of zero: then theirs are numbers, and zero times them is zero.
            x_MH = x_MH.masked_fill((label == IGNORED).view(-1, 1), 0.0)
            label = ports.y.own(label, IGNORED)[0]
            row, mine = vocabulary.find(label, weight_VH)
            logits_MV = torch.mm(x_MH, weight_VH.t(), out=space[: len(x_MH)])
            logits_MV = ports.y.start_leave(logits_MV[None]).wait()[0]
            losses, log_z, scale = _exponentials(logits_MV, row, mine, vocabulary.group)
            if z_loss:
                losses += z_loss * log_z.square()
                scale *= 1.0 + 2.0 * z_loss * log_z
            total += losses.masked_fill(label == IGNORED, 0.0).sum()
            if grad_x is None and grad_weight is None:
                continue
            # In place: the gradient of log Z, less one at the label, and zero where nothing counts.
            logits_MV.mul_(scale.masked_fill(label == IGNORED, 0.0)[:, None])
            logits_MV.scatter_add_(1, row[:, None], mine[:, None].to(logits_MV.dtype).neg_())
            grad_MV = ports.y.start_enter(logits_MV[None], len(x_MH)).wait()[0]
            if grad_x is not None:
                _land(leaving, grad_x)
                leaving.append((chunk, ports.x.start_leave((grad_MV @ weight_VH)[None])))
            if grad_weight is not None:
                add_chunk(grad_weight, grad_MV, x_MH, first=number == 0)
        if grad_weight is not None:
            grad_weight = ports.weight.start_leave(grad_weight).wait()
        if grad_x is not None:
            _land(leaving, grad_x)
            grad_x = grad_x.view(x_BSH.shape)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight = weight
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


def _chunks(rows: int, parts: int, vocabulary: int, hidden: int) -> list[slice]:
    """Which of this rank's ``rows`` to take at a time, the same on all ranks; the others' come with them."""
    step = max(1, chunk_rows(rows * parts, vocabulary, hidden) // parts)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _start_enter(x: Tensor, chunk: slice, port: Port) -> Arriving[Tensor]:
    part = x[:, chunk]
    return port.start_enter(part, port.full(part))


def _land(leaving: list[tuple[slice, Arriving[Tensor]]], grad_x: Tensor) -> None:
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


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What sums over the vocabulary are made in."""
    return torch.promote_types(dtype, torch.float32)
