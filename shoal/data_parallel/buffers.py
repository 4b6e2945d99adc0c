"""Buffers of replicas: tensors that no gradient keeps equal, such as running statistics."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.comm.backends import Reduction
from shoal.comm.collectives import all_reduce, broadcast
from shoal.comm.world import Group

_REDUCTIONS: tuple[tuple[bool, Reduction], ...] = ((True, "sum"), (False, "max"))


@torch.no_grad()
def copy_from_first(buffers: Iterable[Tensor], replicas: Group) -> None:
    """Give every replica the buffers of the first."""
    for buffer in buffers:
        dense = buffer.contiguous().reshape(-1)
        broadcast(dense.view(torch.uint8), replicas, "start")  # bytes: gloo knows few dtypes
        buffer.copy_(dense.view_as(buffer))


@torch.no_grad()
def average(buffers: Iterable[Tensor], replicas: Group) -> None:
    """Floating-point and complex buffers become their mean over the replicas, those that count their largest.

    Means are summed in float64, so that a buffer that is equal everywhere stays what it is.
    """
    if replicas.size == 1:
        return
    real = [_real(buffer) for buffer in buffers]
    for floating, reduction in _REDUCTIONS:
        alike = [buffer for buffer in real if buffer.is_floating_point() == floating]
        if not alike:
            continue
        flat = torch.cat([buffer.flatten().to(torch.float64 if floating else torch.int64) for buffer in alike])
        all_reduce(flat, replicas, "buffers", reduction)
        if floating:
            flat /= replicas.size
        for buffer, values in zip(alike, torch.split(flat, [buffer.numel() for buffer in alike]), strict=True):
            buffer.copy_(values.view_as(buffer))


def put_back(buffers: Iterable[Tensor], before: Iterable[Tensor]) -> None:
    """Give buffers the values that they had ``before``."""
    for buffer, values in zip(buffers, before, strict=True):
        buffer.copy_(values)


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
