"""Memory that a rank's neighbours can map: what lies in it they compute with where it is.

A region is a file without a name, which others open by way of its owner's process. It is not bounded by the size of
``/dev/shm``, has memory only where something was written, and goes with the last tensor in it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right, insort
from collections import deque

import numpy as np


class Regions:
    """Those of this rank."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._at: dict[int, tuple[int, int]] = {}
        """By address of its first byte: how long it is, and its descriptor."""
        self._ended: deque[tuple[int, int]] = deque()
        """Address and descriptor of those that have gone, and that nobody has heard of."""
        self._gone: list[int] = []

    def allocate(self, nbytes: int) -> np.ndarray:
        """So many bytes, zero. Raises ``OSError`` where the system has no such files, or not the memory."""
        descriptor = os.memfd_create("shoal")
        try:
            os.ftruncate(descriptor, nbytes)
            memory = mmap.mmap(descriptor, nbytes)
        except OSError:
            os.close(descriptor)
            raise
        found = np.frombuffer(memory, dtype=np.uint8)
        start = found.ctypes.data
        self._forget()  # one may have been there before
        insort(self._starts, start)
        self._at[start] = nbytes, descriptor
        weakref.finalize(memory, _end, descriptor, start, self._ended)
        return found

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """The descriptor of the region in which some bytes lie, and their place there."""
        number = bisect_right(self._starts, address) - 1
        if number < 0:
            return None
        start = self._starts[number]
        length, descriptor = self._at[start]
        return (descriptor, address - start) if address + nbytes <= start + length else None

    def ended(self) -> list[int]:
        """What were the descriptors of those that have gone since this was last asked."""
        self._forget()
        gone, self._gone = self._gone, []
        return gone

    def _forget(self) -> None:
        while self._ended:
            start, descriptor = self._ended.popleft()
            self._starts.remove(start)
            del self._at[start]
            self._gone.append(descriptor)


def _end(descriptor: int, start: int, ended: deque[tuple[int, int]]) -> None:
    """At whatever moment the last tensor goes."""
    os.close(descriptor)
    ended.append((start, descriptor))
