"""NCCL: between GPUs. It has every collective; messages of one group keep one order, and have no tags."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.comm.backends import Reduction, Work

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class NcclGroup:
    """A communicator, in which this rank is at place ``rank``."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank

    @classmethod
    def meet(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> NcclGroup:
        """Over those that meet at ``store``."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cls(dist.ProcessGroupNCCL(store, rank, size, options), rank)

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Work:
        return started(self._group.allreduce([tensor], all_reduce_options(reduction)))

    def all_gather(self, parts: Sequence[Tensor], own: Tensor | None = None) -> Work:
        return started(self._group._allgather_base(whole(parts), parts[self._rank]))

    def reduce_scatter(self, out: Tensor, parts: Sequence[Tensor]) -> Work:
        return started(self._group._reduce_scatter_base(out, whole(parts)))

    def exchange(self, into: Tensor, taken: Sequence[int], out: Tensor, given: Sequence[int]) -> Work:
        return started(self._group.alltoall_base(into, out, list(taken), list(given), dist.AllToAllOptions()))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return started(self._group.broadcast([tensor], broadcast_options(source)))

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction = "sum") -> Work:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = OPS[reduction], root  # type: ignore[assignment]  # as below
        return started(self._group.reduce([tensor], options))

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        return started(self._group.send([tensor], to, tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        return started(self._group.recv([tensor], source, tag))

    def barrier(self) -> Work:
        return started(self._group.barrier())

    def close(self) -> None:
        if self._group is not dist.group.WORLD:
            self._group.shutdown()


def whole(parts: Sequence[Tensor]) -> Tensor:
    """The flat tensor in which ``parts`` follow one another."""
    first = parts[0]
    return first.as_strided((sum(map(len, parts)),), (1,))


def all_reduce_options(reduction: Reduction) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = OPS[reduction]  # type: ignore[assignment]  # the stub knows one of the two names
    return options


def broadcast_options(source: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = source
    return options


def started(work: Any) -> Work:
    """``work``, of which the stubs do not say what it is."""
    return work  # type: ignore[no-any-return]
