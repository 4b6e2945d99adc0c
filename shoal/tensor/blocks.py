"""The in-features of a linear map in blocks, as the ranks of a group have them.

A product over in-features that come from several ranks is a sum of products of blocks: Y = Σ_t X_t·W_tᵀ. So what is
gathered need not be put side by side, and what is to be summed and divided, dX_t = dY·W_t or dW_t = dYᵀ·X_t, is
computed where it leaves from. Neither is copied.
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

from shoal.comm.collectives import start_all_gather, start_reduce_scatter
from shoal.comm.differentiable import Arriving, pad
from shoal.comm.world import Group
from shoal.meter import mark
from shoal.model.linear import arriving_gradient, later, whole_gradient
from shoal.purposes import COMMUNICATION
from shoal.tensor.ports import PURPOSE, Even, Port, Ports, Shares


@dataclass(frozen=True)
class Blocks:
    """One block from each rank of ``group``, of the widths ``sizes``."""

    group: Group
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, port: Port, part: Tensor) -> Blocks | None:
        """Those that ``port`` divides in-features into, of which this rank has ``part``; None if it does not."""
        if isinstance(port, Shares) and port.dim == -1:
            return cls(port.group, port.sizes)
        if isinstance(port, Even) and port.dim == -1:
            return cls(port.group, (part.shape[-1],) * port.group.size)
        return None

    def start_gather(self, part: Tensor) -> Arriving[list[Tensor]]:
        """Begin to fetch all blocks of what this rank has one of, [rows, width]."""
        room = part.new_empty((self.group.size, len(part), max(self.sizes)))
        mark(COMMUNICATION, room)
        part = pad(part, 1, max(self.sizes)).contiguous()
        return Arriving(start_all_gather(room.view(-1), part, self.group, PURPOSE), lambda: self.slots(room))

    def room(self, rows: int, like: Tensor) -> Tensor:
        """Where terms of all blocks are computed, in :meth:`slots`."""
        shape = self.group.size, rows, max(self.sizes)
        return like.new_empty(shape) if len(set(self.sizes)) == 1 else like.new_zeros(shape)

    def slots(self, room: Tensor) -> list[Tensor]:
        """The places [rows, width] of the blocks."""
        return [block[:, :width] for block, width in zip(room, self.sizes, strict=True)]

    def start_sum(self, room: Tensor) -> Arriving[Tensor]:
        """Begin to sum the ranks' terms of each block, for the rank that has it."""
        own, width = room.new_empty(room.shape[1:]), self.sizes[self.group.index]
        pending = start_reduce_scatter(own, room.view(-1), self.group, PURPOSE)
        return Arriving(pending, lambda: own[:, :width])


def block_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ports: Ports) -> Tensor:
    """This rank's block of Y [..., out], where ranks have blocks of the in-features of ``weight`` [out, in], and of
    those of ``x``, or parts of its rows."""
    y: Tensor = _BlockLinear.apply(x, weight, bias, ports)  # type: ignore[no-untyped-call]
    return y


class _BlockLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ports: Ports) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.ports, x_length = weight, ports, ports.x.full(x)
        coming_x, coming_weight = _start_x(x, x_length, weight, ports), _blocks(weight, ports).start_gather(weight)
        xs, ws = coming_x.wait(), coming_weight.wait()
        term = _add_up(xs, ws).view(*_rows_of(x, x_length, ports), -1)
        del xs, ws  # what was gathered, before the terms of others come
        ctx.lengths = x_length, term.shape[ports.y.dim]
        y = ports.y.start_leave(term).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        weight, ports = ctx.weight, ctx.ports
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        coming_y = ports.y.start_enter(grad, ctx.lengths[1])
        coming_weight = _blocks(weight, ports).start_gather(weight) if needs_x else None
        needs_weight = needs_weight and not later(weight, partial(_later, weight, x, grad, ports, ctx.lengths))
        coming_x = _start_x(x, ctx.lengths[0], weight, ports) if needs_weight else None
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        grad = coming_y.wait()
        leaving_x = _start_leave_x(grad, coming_weight.wait(), x, ports) if coming_weight else None
        leaving_weight = _start_leave_weight(weight, coming_x, grad, ports) if coming_x else None
        grad_weight = arriving_gradient(weight, leaving_weight.wait) if leaving_weight else None
        return leaving_x.wait().view(x.shape) if leaving_x else None, grad_weight, grad_bias, None


def _blocks(weight: Tensor, ports: Ports) -> Blocks:
    found = Blocks.of(ports.weight, weight)
    assert found is not None, "the weight's in-features lie on several ranks"
    return found


def _rows_of(x: Tensor, length: int, ports: Ports) -> list[int]:
    """The shape of X without its features."""
    rows = list(x.shape)
    if Blocks.of(ports.x, x) is None:
        rows[ports.x.dim] = length
    return rows[:-1]


def _start_x(x: Tensor, length: int, weight: Tensor, ports: Ports) -> Arriving[list[Tensor]]:
    """Begin to fetch the blocks [rows, width] of X."""
    if (blocks := Blocks.of(ports.x, x)) is not None:
        return blocks.start_gather(x.flatten(0, -2))
    widths = list(_blocks(weight, ports).sizes)
    return ports.x.start_enter(x, length).then(lambda whole: list(whole.flatten(0, -2).split(widths, 1)))


def _start_leave_x(grad: Tensor, ws: list[Tensor], x: Tensor, ports: Ports) -> Arriving[Tensor]:
    """Begin to make the gradient of X and to bring it to where X is."""
    rows = grad.flatten(0, -2)
    if (blocks := Blocks.of(ports.x, x)) is not None:
        room = blocks.room(len(rows), grad)
        for slot, w in zip(blocks.slots(room), ws, strict=True):
            torch.mm(rows, w, out=slot)
        return blocks.start_sum(room)
    term = rows.new_empty(len(rows), sum(w.shape[1] for w in ws))
    for slot, w in zip(term.split([w.shape[1] for w in ws], 1), ws, strict=True):
        torch.mm(rows, w, out=slot)
    return ports.x.start_leave(term.view(*grad.shape[:-1], -1))


def _start_leave_weight(
    weight: Tensor, coming_x: Arriving[list[Tensor]], grad: Tensor, ports: Ports
) -> Arriving[Tensor]:
    """Begin to make the gradient of W and to bring it to where W is."""
    rows, blocks = grad.flatten(0, -2).t(), _blocks(weight, ports)
    room = blocks.room(len(rows), grad)
    for slot, x in zip(blocks.slots(room), coming_x.wait(), strict=True):
        torch.mm(rows, x, out=slot)
    return blocks.start_sum(room)


def _later(weight: Tensor, x: Tensor, grad: Tensor, ports: Ports, lengths: tuple[int, int]) -> None:
    """What came for the gradient of X is fetched again rather than kept."""
    coming_x, coming_y = _start_x(x, lengths[0], weight, ports), ports.y.start_enter(grad, lengths[1])
    whole_gradient(weight, _start_leave_weight(weight, coming_x, coming_y.wait(), ports).wait())


def _add_up(xs: Sequence[Tensor], ws: Sequence[Tensor]) -> Tensor:
    """Σ_t X_t·W_tᵀ, of blocks [rows, K_t] and [out, K_t].

    In half precision each product rounds the sum once more: of two blocks the error is 1.2 times that of one product,
    of four 1.6 times. Products that were rounded before they are added up in float32 are no better until there are
    four, and those that are made in float32 cost several times as much.
    """
    y = torch.mm(xs[0], ws[0].t())
    for x, w in zip(xs[1:], ws[1:], strict=True):
        y.addmm_(x, w.t())
    return y
