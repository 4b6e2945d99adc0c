"""The collectives Shoal uses, those that move tensors entered in the ledger.

All take a :class:`~shoal.comm.world.Group` and act in place; in a group of one rank they do nothing. ``purpose`` says
what the words are for ("gradients", "norm", …).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.world import Group

Reduction = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending:
    """A collective under way; :meth:`wait` returns when its result may be read."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def start_all_reduce(tensor: Tensor, group: Group, purpose: str, reduction: Reduction = "sum") -> Pending:
    """Begin to reduce ``tensor`` (contiguous) over ``group`` in place."""
    if group.handle is None:
        return Pending(None)
    group.ledger.record("all_reduce", tensor.numel(), group.size, group.axis, purpose)
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[reduction]  # type: ignore[assignment]  # the stub knows one of the two names
    return Pending(group.handle.allreduce([tensor], options))


def all_reduce(tensor: Tensor, group: Group, purpose: str, reduction: Reduction = "sum") -> None:
    """Reduce ``tensor`` (contiguous) over ``group`` in place."""
    start_all_reduce(tensor, group, purpose, reduction).wait()


def broadcast(tensor: Tensor, group: Group, purpose: str) -> None:
    """Copy the ``tensor`` (contiguous) of the group's lowest rank to all its ranks."""
    if group.handle is not None:
        group.ledger.record("broadcast", tensor.numel(), group.size, group.axis, purpose)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        group.handle.broadcast([tensor], options).wait()


def barrier(group: Group) -> None:
    """Return once every rank of ``group`` has called this."""
    if group.handle is not None:
        group.handle.barrier().wait()


def all_gather_bytes(data: bytes, group: Group, device: torch.device) -> list[bytes]:
    """Every rank's ``data``, in the group's order. Bytes, not objects: nothing is unpickled between ranks."""
    if group.handle is None:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in group.ranks]
    group.handle.allgather([sizes], [torch.tensor([len(data)], device=device)]).wait()
    lengths = [int(size.item()) for size in sizes]
    width = max(1, *lengths)
    mine = torch.zeros(width, dtype=torch.uint8, device=device)
    mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].to(device)
    parts = [torch.empty_like(mine) for _ in group.ranks]
    group.handle.allgather([parts], [mine]).wait()
    return [bytes(part[:n].cpu().numpy().tobytes()) for part, n in zip(parts, lengths, strict=True)]
