"""Collectives on activations: along a dim of a tensor, under way while other work is done, and with their gradients.

A dim of ``length`` elements is divided over P ranks in parts of ⌈length/P⌉, in the group's order; what the last ones
have too much is padding. A sum divides with zeros there, a gather leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from shoal.comm.world import Group


@dataclass(frozen=True)
class Arriving:
    """A tensor that a collective is bringing."""

    pending: Pending
    arrange: Callable[[], Tensor]

    def wait(self) -> Tensor:
        self.pending.wait()
        return self.arrange()


def here(x: Tensor) -> Arriving:
    """A tensor that need not come from anywhere."""
    return Arriving(Pending(None), lambda: x)


def start_sum(x: Tensor, group: Group, purpose: str) -> Arriving:
    """Begin to sum the ranks' ``x`` (contiguous), in place."""
    return Arriving(start_all_reduce(x, group, purpose), lambda: x)


def start_gather(part: Tensor, dim: int, length: int, group: Group, purpose: str) -> Arriving:
    """Begin to put together a tensor with ``length`` elements along ``dim`` from each rank's ``part`` of it."""
    part, dim = part.contiguous(), dim % part.ndim
    parts = part.new_empty((group.size, *part.shape))

    def arrange() -> Tensor:
        return parts.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, length)

    return Arriving(start_all_gather(parts.view(-1), part, group, purpose), arrange)


def start_divided_sum(x: Tensor, dim: int, group: Group, purpose: str) -> Arriving:
    """Begin to sum the ranks' ``x`` and divide the sum along ``dim``: this rank's part."""
    dim = dim % x.ndim
    size = part_size(x.shape[dim], group.size)
    padded = pad(x, dim, size * group.size)
    parts = padded.unflatten(dim, (group.size, size)).movedim(dim, 0).contiguous()
    out = parts.new_empty(parts.shape[1:])
    return Arriving(start_reduce_scatter(out, parts.view(-1), group, purpose), lambda: out)


def part_size(length: int, ranks: int) -> int:
    """⌈length/ranks⌉."""
    return -(-length // ranks)


def pad(x: Tensor, dim: int, length: int, value: float = 0.0) -> Tensor:
    """``x`` with ``value`` after its end along ``dim``, up to ``length`` elements; ``x`` itself if it has as many."""
    missing = length - x.shape[dim]
    return F.pad(x, (*(0, 0) * (x.ndim - 1 - dim % x.ndim), 0, missing), value=value) if missing else x


def total(x: Tensor, group: Group, purpose: str) -> Tensor:
    """The sum of the ranks' ``x`` (contiguous), in its place. Every rank goes on alike from it, so the gradient of the
    sum, the same on all of them, is that of each term."""
    result: Tensor = _Total.apply(x, group, purpose)  # type: ignore[no-untyped-call]
    return result


class _Total(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, purpose: str) -> Tensor:
        ctx.mark_dirty(x)
        return start_sum(x, group, purpose).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def divided_total(x: Tensor, dim: int, group: Group, purpose: str) -> Tensor:
    """This rank's part, along ``dim``, of the sum of the ranks' ``x``. Backward, the parts' gradients are gathered."""
    result: Tensor = _DividedTotal.apply(x, dim, group, purpose)  # type: ignore[no-untyped-call]
    return result


class _DividedTotal(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, purpose: str) -> Tensor:
        ctx.arguments = dim, x.shape[dim], group, purpose
        return start_divided_sum(x, dim, group, purpose).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return start_gather(grad, *ctx.arguments).wait(), None, None, None


def joined(x: Tensor, dim: int, sizes: Sequence[int], group: Group, purpose: str) -> Tensor:
    """The ranks' ``x``, of ``sizes`` along ``dim``, one after another. Every rank goes on alike from it, so the
    gradient of ``x`` is this rank's part of that of the whole."""
    result: Tensor = _Joined.apply(x, dim, sizes, group, purpose)  # type: ignore[no-untyped-call]
    return result


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], group: Group, purpose: str) -> Tensor:
        ctx.arguments = dim, sum(sizes[: group.index]), sizes[group.index]
        most = max(sizes)
        gathered = start_gather(pad(x, dim, most), dim, most * group.size, group, purpose).wait()
        parts = gathered.split(most, dim)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad.narrow(*ctx.arguments), None, None, None, None
