"""Which tokens a rank routes: every token of a micro-batch on one rank, and all of its features there.

What tensor and context parallelism leave of the stream on a rank may be some of the positions, some of the features, or
the same as on others. So before the gate

- of a stream that is repeated each rank takes its share of the tokens, and what comes back is gathered;
- of one whose features are divided over q ranks an all-to-all makes whole rows of 1/q of the tokens, and another one
  what they were;
- otherwise tokens are distinct as they are.

Samples and positions that pad the others take no part. What a gate must see of whole sequences, their scores, is
gathered from the ranks that have tokens of them: few words, E for each token where the stream has H.

Axes in names: B samples, T positions, H hidden, N tokens here, S sequences, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import all_reduce, start_exchange
from shoal.comm.differentiable import joined, start_join
from shoal.comm.world import Group
from shoal.layout.kinds import split_evenly
from shoal.mesh import Mesh
from shoal.model.context import Context

PURPOSE = "tokens"


@dataclass(frozen=True)
class Stream:
    """Over which mesh axes what of the stream is divided; where several divide one dim, the outer first.

    Blocks of ``samples`` are whole numbers of ``multiple``. On the axis ``repeated`` ranks have the same. ``context``
    are axes on which ranks have the positions that the micro-batch's context says.
    """

    samples: tuple[str, ...] = ()
    multiple: int = 1
    positions: str | None = None
    hidden: str | None = None
    repeated: str | None = None
    context: tuple[str, ...] = ()

    @property
    def shared(self) -> tuple[str, ...]:
        """The axes on which ranks have tokens of the same sequences."""
        return (*self.context, *(axis for axis in (self.positions, self.hidden, self.repeated) if axis))


class DividedTokens(nn.Module):
    """Takes the tokens that this rank routes out of its part of the ``stream``."""

    def __init__(self, stream: Stream, mesh: Mesh) -> None:
        super().__init__()
        self.stream, sizes = stream, dict(mesh.grid.axes)
        whole = tuple(axis for axis in stream.shared if axis not in stream.context)
        self.whole, self.sequences = mesh.over(*whole), mesh.over(*stream.shared)
        self.everyones = mesh.over(*stream.shared, *stream.samples)
        self.across = mesh.over(*(axis for axis in (stream.hidden, stream.repeated) if axis))
        self.part = 0
        for axis in stream.samples:
            self.part = self.part * sizes[axis] + mesh.coords[axis]
        self.at = mesh.coords[stream.positions] if stream.positions else 0

    def forward(self, x_BTH: Tensor, ctx: Context) -> SomeTokens:
        return SomeTokens(self, x_BTH, ctx)


class SomeTokens:
    """See :class:`shoal.model.routed.Taken`."""

    def __init__(self, way: DividedTokens, x_BTH: Tensor, ctx: Context) -> None:
        self._way, self._ctx, self._shape = way, ctx, x_BTH.shape
        samples, positions = x_BTH.shape[:2]
        self._first = way.part * samples
        self._samples = min(max(0, ctx.samples - self._first), samples)
        # Where a text is generated, every rank of context parallelism has all positions.
        self._sequences = way.whole if ctx.blocks is None else way.sequences
        places = ctx.places
        number = torch.arange(samples, device=x_BTH.device)[:, None]
        if places is None:
            places = torch.arange(positions, device=x_BTH.device) + way.at * positions
        real = ((number < self._samples) & (places < ctx.length)).flatten().nonzero()[:, 0]
        self._real = real if len(real) < samples * positions else None
        whole = ctx.samples if ctx.counted is None else len(ctx.counted)
        if whole < ctx.samples:  # samples here are parts of the whole ones, which all have parts of
            number = (self._first + number) % whole
            self._sequences, self._first, self._samples = way.everyones, 0, whole
        where = (number * ctx.length + places).flatten()[real]
        self._sizes = tuple(split_evenly(len(real), way.across.size))
        self._where = where.split(self._sizes)[way.across.index]
        x = x_BTH.flatten(0, 1)
        self.rows = self._enter(x if self._real is None else x.index_select(0, self._real))
        self.sharers = self._sequences.size

    def of_all(self, scores_NE: Tensor) -> Tensor:
        shape = self._samples, self._ctx.length, scores_NE.shape[1]
        whole: Tensor = _Everyones.apply(scores_NE, self._where, shape, self._sequences)  # type: ignore[no-untyped-call]
        return whole

    def of_own(self, found_STE: Tensor) -> Tensor:
        return found_STE.flatten(0, 1).index_select(0, self._where)

    def counted(self) -> Tensor:
        assert self._ctx.counted is not None, "losses are of positions with labels"
        return self._ctx.counted[self._first : self._first + self._samples]

    def give_back(self, y_NH: Tensor) -> Tensor:
        y = self._leave(y_NH)
        if self._real is not None:
            y = y.new_zeros(self._shape[0] * self._shape[1], y.shape[1]).index_copy(0, self._real, y)
        return y.view(self._shape)

    def _enter(self, x: Tensor) -> Tensor:
        way, across = self._way, self._way.across
        if across.size == 1:
            return x
        enter = _Rows if way.stream.hidden else _Share
        rows: Tensor = enter.apply(x, self._sizes, across)  # type: ignore[no-untyped-call]
        return rows

    def _leave(self, y: Tensor) -> Tensor:
        way, across = self._way, self._way.across
        if across.size == 1:
            return y
        if way.stream.hidden:
            columns: Tensor = _Columns.apply(y, self._sizes, across)  # type: ignore[no-untyped-call]
            return columns
        return joined(y, 0, self._sizes, across, PURPOSE)


class _Everyones(torch.autograd.Function):
    """The scores of all tokens. Every rank goes on alike from them, so the gradient of its own is all there."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, where: Tensor, shape: Sequence[int], group: Group) -> Tensor:
        ctx.save_for_backward(where)
        whole = scores.new_zeros(shape[0] * shape[1], shape[2]).index_copy_(0, where, scores)
        if whole.numel():
            all_reduce(whole, group, "scores")
        return whole.view(tuple(shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (where,) = ctx.saved_tensors
        return grad.flatten(0, 1).index_select(0, where), None, None, None


class _Share(torch.autograd.Function):
    """This rank's share of rows that all have. Backward the others' gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
        ctx.arguments = sizes, group
        share: Tensor = x.narrow(0, sum(sizes[: group.index]), sizes[group.index])
        return share.view_as(share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sizes, group = ctx.arguments
        return start_join(grad, 0, sizes, group, PURPOSE).wait(), None, None


class _Rows(torch.autograd.Function):
    """Whole rows of some tokens, of some columns of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
        ctx.arguments = sizes, group
        return _rows(x, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _columns(grad, *ctx.arguments), None, None


class _Columns(torch.autograd.Function):
    """The opposite."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
        ctx.arguments = sizes, group
        return _columns(y, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rows(grad, *ctx.arguments), None, None


def _rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """[own, H] of the columns [all, H/q] of tokens of which ranks own ``sizes``."""
    width, own = x.shape[1], sizes[group.index]
    given = [0 if at == group.index else width * size for at, size in enumerate(sizes)]
    taken = [0 if at == group.index else width * own for at in range(group.size)]
    parts = list(x.split(list(sizes)))
    kept, parts[group.index] = parts[group.index], parts[group.index][:0]
    into = x.new_empty(sum(taken))
    start_exchange(into, taken, torch.cat(parts).view(-1), given, group, PURPOSE).wait()
    came = [part.view(-1, width) for part in into.split(taken)]
    came[group.index] = kept
    return torch.cat(came, 1)


def _columns(y: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """[all, H/q] of the rows [own, H] of tokens of which ranks own ``sizes``."""
    width, own = y.shape[1] // group.size, sizes[group.index]
    given = [0 if at == group.index else width * own for at in range(group.size)]
    taken = [0 if at == group.index else width * size for at, size in enumerate(sizes)]
    parts = list(y.split(width, 1))
    kept, parts[group.index] = parts[group.index], parts[group.index][:0]
    into = y.new_empty(sum(taken))
    start_exchange(into, taken, torch.cat(parts).view(-1), given, group, PURPOSE).wait()
    came = [part.view(-1, width) for part in into.split(taken)]
    came[group.index] = kept
    return torch.cat(came)
