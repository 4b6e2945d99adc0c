"""gloo: between processors, on one machine or several, and between ranks that share a GPU.

It lacks a reduce-scatter that moves what one needs to move, and sums to one rank; both are made here of what it has.
It moves the host's memory alone, so messages between GPUs are staged there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.backends import JOIN, Reduction, Work
from shoal.comm.backends.nccl import all_reduce_options, broadcast_options, started, whole

FEW = 4
"""Up to so many ranks a gather is a broadcast from each: the same words, for less of the processor's time (measured on
2 and 4 ranks, with 64 KiB to 768 KiB a rank: half and two thirds)."""
TERM_TAG = 1 << 30
"""Of the messages of a reduce; other messages have lower ones."""
_LANDINGS = 2


class GlooGroup:
    """The ranks that meet at ``store``, this one at place ``rank`` of ``size``."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)  # the stubs leave out most of it
        self.group = group
        self.group.barrier().wait()

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Work:
        return started(self.group.allreduce([tensor], all_reduce_options(reduction)))

    def all_gather(self, parts: Sequence[Tensor], own: Tensor | None = None) -> Work:
        parts = [part.view(torch.uint8) for part in parts]  # gloo moves numbers of a few dtypes
        if self.size <= FEW:
            return _All([self.broadcast(part, source) for source, part in enumerate(parts)])
        return started(self.group._allgather_base(whole(parts), parts[self.rank]))

    def reduce_scatter(self, out: Tensor, parts: Sequence[Tensor]) -> Work:
        return _Terms(self, out, parts) if len(out) else _All([])

    def exchange(self, into: Tensor, taken: Sequence[int], out: Tensor, given: Sequence[int]) -> Work:
        return started(self.group.alltoall_base(into, out, list(taken), list(given), dist.AllToAllOptions()))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return started(self.group.broadcast([tensor], broadcast_options(source)))

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction = "sum") -> Work:
        """Reduces of one group are waited for in the order in which they were started."""
        if not tensor.numel():
            return _All([])
        if self.rank == root:
            return _Sum(self, tensor, reduction)
        # Between two ranks a broadcast does it, for less of the processor's time.
        return self.send(tensor, root, TERM_TAG) if self.size > 2 else self.broadcast(tensor, self.rank)

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        return started(self.group.send([tensor.cpu() if _staged(tensor) else tensor], to, tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        if _staged(tensor):
            return _Landing(self, tensor, source, tag)
        return started(self.group.recv([tensor], source, tag))

    def barrier(self) -> Work:
        return started(self.group.barrier())

    def close(self) -> None:
        self.group.shutdown()


def exact(tensor: Tensor) -> torch.dtype:
    """What three or more terms are added up in: sums in half precision are rounded once."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def _staged(tensor: Tensor) -> bool:
    return tensor.is_cuda


class _All:
    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class _Terms:
    """Every rank gets from each other one the term of its own part, and adds them up in ``out``."""

    def __init__(self, group: GlooGroup, out: Tensor, parts: Sequence[Tensor]) -> None:
        tensor = whole(parts)
        landing = torch.empty_like(tensor)
        self._terms, self._out = landing.tensor_split(group.size), out
        self._work: Work | None = group.exchange(landing, [], tensor, [])

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            first, second, *rest = self._terms
            if not rest:
                torch.add(first, second, out=self._out)
                return
            total = first.to(exact(first)) + second
            for term in rest:
                total += term
            self._out.copy_(total)


class _Sum:
    """Adds what every other rank sends to ``tensor``, or joins it by another reduction. At most ``_LANDINGS`` terms are
    here at a time, however many ranks there are; the others stay where they come from."""

    def __init__(self, group: GlooGroup, tensor: Tensor, reduction: Reduction) -> None:
        self._group, self._tensor, self._join = group, tensor, JOIN[reduction]
        self._total = tensor.to(exact(tensor)) if group.size > 2 else tensor
        self._sources = iter([(group.rank - i) % group.size for i in range(1, group.size)])
        self._coming: deque[tuple[Tensor, Work]] = deque()
        for source in islice(self._sources, _LANDINGS):
            self._receive(torch.empty_like(tensor), source)

    def _receive(self, term: Tensor, source: int) -> None:
        group = self._group
        coming = group.receive(term, source, TERM_TAG) if group.size > 2 else group.broadcast(term, source)
        self._coming.append((term, coming))

    def wait(self) -> None:
        while self._coming:
            term, work = self._coming.popleft()
            work.wait()
            self._join(self._total, term, out=self._total)
            for source in islice(self._sources, 1):
                self._receive(term, source)
        if self._total is not self._tensor:
            self._tensor.copy_(self._total)


class _Landing:
    """A message on its way to the host, and from there to ``tensor``, on a GPU."""

    def __init__(self, group: GlooGroup, tensor: Tensor, source: int, tag: int) -> None:
        self._tensor = tensor
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._work: Work | None = started(group.group.recv([self._host], source, tag))

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._tensor.copy_(self._host)
