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


def start_join(part: Tensor, dim: int, sizes: Sequence[int], group: Group, purpose: str) -> Arriving:
    """Begin to put the ranks' parts, of ``sizes`` along ``dim``, one after another."""
    most = max(sizes)
    gathered = start_gather(pad(part, dim, most), dim, most * group.size, group, purpose)

    def arrange() -> Tensor:
        parts = gathered.arrange().split(most, dim)
        return torch.cat([one.narrow(dim, 0, size) for one, size in zip(parts, sizes, strict=True)], dim)

    return Arriving(gathered.pending, arrange)


def start_shared_sum(x: Tensor, dim: int, sizes: Sequence[int], group: Group, purpose: str) -> Arriving:
    """Begin to sum the ranks' ``x`` and divide the sum along ``dim`` into parts of ``sizes``: this rank's."""
    most, own = max(sizes), sizes[group.index]
    padded = torch.cat([pad(one, dim, most) for one in x.split(list(sizes), dim)], dim)
    summed = start_divided_sum(padded, dim, group, purpose)
    return Arriving(summed.pending, lambda: summed.arrange().narrow(dim, 0, own))


def part_size(length: int, ranks: int) -> int:
    """⌈length/ranks⌉."""
    return -(-length // ranks)


def pad(x: Tensor, dim: int, length: int, value: float = 0.0) -> Tensor:
    """``x`` with ``value`` after its end along ``dim``, up to ``length`` elements; ``x`` itself if it has as many."""
    missing = length - x.shape[dim]
    return F.pad(x, (*(0, 0) * (x.ndim - 1 - dim % x.ndim), 0, missing), value=value) if missing else x


def joined(x: Tensor, dim: int, sizes: Sequence[int], group: Group, purpose: str) -> Tensor:
    """The ranks' ``x``, of ``sizes`` along ``dim``, one after another. Every rank goes on alike from it, so the
    gradient of ``x`` is this rank's part of that of the whole."""
    result: Tensor = _Joined.apply(x, dim, sizes, group, purpose)  # type: ignore[no-untyped-call]
    return result


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], group: Group, purpose: str) -> Tensor:
        ctx.arguments = dim, sum(sizes[: group.index]), sizes[group.index]
        return start_join(x, dim, sizes, group, purpose).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad.narrow(*ctx.arguments), None, None, None, None
