"""Collectives on activations: along a dim of a tensor, under way while other work is done, and with their gradients.

A dim of ``length`` elements is divided over P ranks in parts of ⌈length/P⌉, in the group's order; what the last ones
have too much is padding. A sum divides with zeros there, a gather leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import Pending, start_all_gather, start_all_reduce, start_broadcast, start_reduce_scatter
from shoal.comm.world import Group
from shoal.meter import mark
from shoal.purposes import COMMUNICATION

T = TypeVar("T")
S = TypeVar("S")


class Arriving(Generic[T]):
    """What a collective is bringing: a tensor, or several. It is asked for once, and ``arrange`` makes it of what has
    come, which may then go, whoever still has this."""

    def __init__(self, pending: Pending, arrange: Callable[[], T]) -> None:
        self._pending = pending
        self._arrange: Callable[[], T] | None = arrange

    def wait(self) -> T:
        arrange, self._arrange = self._arrange, None
        assert arrange is not None, "nobody has asked for it"
        self._pending.wait()
        return arrange()

    def then(self, change: Callable[[T], S]) -> Arriving[S]:
        """What is made of it when it is there."""
        return Arriving(Pending(None), lambda: change(self.wait()))


def here(x: Tensor) -> Arriving[Tensor]:
    """A tensor that need not come from anywhere."""
    return Arriving(Pending(None), lambda: x)


def start_sum(x: Tensor, group: Group, purpose: str) -> Arriving[Tensor]:
    """Begin to sum the ranks' ``x`` (contiguous), in place."""
    return Arriving(start_all_reduce(x, group, purpose), lambda: x)


def start_gather(part: Tensor, dim: int, length: int, group: Group, purpose: str) -> Arriving[Tensor]:
    """Begin to put together a tensor with ``length`` elements along ``dim`` from each rank's ``part`` of it."""
    return start_join(part, dim, _parts_of(length, group.size), group, purpose)


def start_join(part: Tensor, dim: int, sizes: Sequence[int], group: Group, purpose: str) -> Arriving[Tensor]:
    """Begin to put the ranks' parts, of ``sizes`` along ``dim``, one after another; a part may have padding up to the
    longest. Where one rank has all there is, that is broadcast."""
    if group.size > 1 and sum(map(bool, sizes)) == 1:
        return _start_only(part, dim, sizes.index(sum(sizes)), sum(sizes), group, purpose)
    part, dim = pad(part, dim, max(sizes)).contiguous(), dim % part.ndim
    parts = part.new_empty((group.size, *part.shape))
    mark(COMMUNICATION, parts)

    def arrange() -> Tensor:
        if dim == 0 and len(set(sizes)) == 1:
            return parts.flatten(0, 1)
        held = parts.unbind()
        if len(set(sizes)) > 1:
            held = tuple(one.narrow(dim, 0, size) for one, size in zip(held, sizes, strict=True))
        return torch.cat(held, dim)

    return Arriving(start_all_gather(parts.view(-1), part, group, purpose), arrange)


def _start_only(part: Tensor, dim: int, source: int, length: int, group: Group, purpose: str) -> Arriving[Tensor]:
    """Begin to bring all ranks the ``length`` elements along ``dim`` of the one that has any."""
    shape = list(part.shape)
    shape[dim] = length
    whole = part.narrow(dim, 0, length).contiguous() if group.index == source else part.new_empty(shape)
    return Arriving(start_broadcast(whole, group, purpose, source), lambda: whole)


def start_divided_sum(x: Tensor, dim: int, group: Group, purpose: str) -> Arriving[Tensor]:
    """Begin to sum the ranks' ``x`` and divide the sum along ``dim``: this rank's part, with its padding."""
    return _start_sum_of_each(_apart(x, dim, _parts_of(x.shape[dim], group.size)), group, purpose)


def start_shared_sum(x: Tensor, dim: int, sizes: Sequence[int], group: Group, purpose: str) -> Arriving[Tensor]:
    """Begin to sum the ranks' ``x`` and divide the sum along ``dim`` into parts of ``sizes``: this rank's."""
    summing = _start_sum_of_each(_apart(x, dim, sizes), group, purpose)
    return summing.then(lambda part: part.narrow(dim, 0, sizes[group.index]))


def _start_sum_of_each(parts: Tensor, group: Group, purpose: str) -> Arriving[Tensor]:
    out = parts.new_empty(parts.shape[1:])
    return Arriving(start_reduce_scatter(out, parts.view(-1), group, purpose), lambda: out)


def _apart(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts of ``x`` one after another in memory, [parts, …], zero up to the longest."""
    dim, most = dim % x.ndim, max(sizes)
    if len(set(sizes)) == 1:
        parts: Tensor = x.unflatten(dim, (len(sizes), most)).movedim(dim, 0).contiguous()
        return parts
    parts = x.new_zeros((len(sizes), *x.shape[:dim], most, *x.shape[dim + 1 :]))
    for part, one in zip(parts, x.split(list(sizes), dim), strict=True):
        part.narrow(dim, 0, one.shape[dim]).copy_(one)
    return parts


def _parts_of(length: int, ranks: int) -> list[int]:
    """How much of ``length`` elements in parts of ⌈length/ranks⌉ is in each."""
    size = part_size(length, ranks)
    return [min(size, max(0, length - start)) for start in range(0, size * ranks, size)] if size else [0] * ranks


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
