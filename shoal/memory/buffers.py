"""Host memory that what comes from or goes to the device or the disk passes through.

Direct I/O asks for aligned memory and a GPU's copies for pinned memory. Both are dear to have and cheap to keep, so
buffers are parts of a few large regions, and are lent again when they come back.
"""

from __future__ import annotations

import mmap
from bisect import insort

import torch
from torch import Tensor

from shoal.meter import BUFFERS, mark_host

ALIGNMENT = 4096
"""Of addresses, in bytes: a page, and what direct I/O asks for."""


class Buffers:
    """A pool that begins with a region of ``nbytes``. It maps another when nothing that is free is large enough, so it
    grows to what is lent at the same time (and what no longer fits between), and no further. ``pinned`` needs CUDA.
    """

    def __init__(self, nbytes: int = 0, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._regions: list[Tensor] = []
        self._free: list[tuple[int, int]] = []
        """Spans of addresses, in order; neighbours in a region are one."""
        self._lent: dict[int, int] = {}
        if nbytes:
            self._add(_whole(nbytes))

    @property
    def regions(self) -> tuple[Tensor, ...]:
        """All the memory that it has, lent or not; bytes."""
        return tuple(self._regions)

    def take(self, nbytes: int) -> Tensor:
        """Borrow ``nbytes`` of memory, as a tensor of bytes at an address that is a multiple of ``ALIGNMENT``. The
        smallest free span that is large enough is used."""
        size = _whole(max(nbytes, 1))
        fitting = [span for span in self._free if span[1] - span[0] >= size]
        if not fitting:
            self._add(size)
            return self.take(nbytes)
        start, stop = min(fitting, key=lambda span: span[1] - span[0])
        self._free.remove((start, stop))
        if stop - start > size:
            insort(self._free, (start + size, stop))
        self._lent[start] = size
        region = next(one for one in self._regions if one.data_ptr() <= start < one.data_ptr() + len(one))
        at = start - region.data_ptr()
        return region[at : at + nbytes]

    def give(self, tensor: Tensor) -> None:
        """Return what :meth:`take` gave."""
        start = tensor.data_ptr()
        stop = start + self._lent.pop(start)
        borders = {one.data_ptr() for one in self._regions}
        for span in list(self._free):
            if span[1] == start and start not in borders:
                self._free.remove(span)
                start = span[0]
            elif span[0] == stop and stop not in borders:
                self._free.remove(span)
                stop = span[1]
        insort(self._free, (start, stop))

    def close(self) -> None:
        """Unpin everything; nothing may be lent. The memory goes with the last tensor of it."""
        assert not self._lent
        if self._pinned:
            for region in self._regions:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(region.data_ptr()))
        self._regions, self._free = [], []

    def _add(self, size: int) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        region = torch.frombuffer(memory, dtype=torch.uint8)
        mark_host(BUFFERS, region)
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(region.data_ptr(), size, 0))
        self._regions.append(region)
        insort(self._free, (region.data_ptr(), region.data_ptr() + size))


def _whole(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
