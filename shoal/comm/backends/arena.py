"""Memory in which a rank puts what others are to read: they have it mapped, and tell when they have read it."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from contextlib import suppress

import numpy as np

ALIGNMENT = 64
"""Bytes: a cache line, and whole elements of every dtype."""
_STEP = 16 << 20
"""The system is asked for so many bytes more at a time."""


class Arena:
    """The first ``size`` bytes of the file ``descriptor``, all of whose readers are other processes.

    The system is asked for memory before it is first used: a process that wrote where the system has none to give would
    be ended by a signal. Whatever is free nearest the start is taken first, so what is used over and over stays small
    and in the caches.
    """

    def __init__(self, descriptor: int, size: int, at_once: int) -> None:
        """Raises ``OSError`` where the system does not have even the bytes that are needed ``at_once``."""
        self.descriptor, self._limit, self._given = descriptor, size, 0
        os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, at_once)
        self._given = at_once
        self.bytes = mapped(descriptor, size)
        self._readers: dict[int, int] = {}
        """By place: how many have yet to read what is there."""
        self._lengths: dict[int, int] = {}
        self._free = [(0, size)]
        """Places and lengths, in order."""

    def place(self, data: np.ndarray, readers: int) -> int | None:
        """Put bytes where ``readers`` will read them; returns the place, or None where there is no room now."""
        length = -(-len(data) // ALIGNMENT) * ALIGNMENT
        found = next((number for number, (_, room) in enumerate(self._free) if room >= length), None)
        if found is None or not self._back(self._free[found][0] + length):
            return None
        start, room = self._free[found]
        if room > length:
            self._free[found] = start + length, room - length
        else:
            del self._free[found]
        self._lengths[start], self._readers[start] = length, readers
        self.bytes[start : start + len(data)] = data
        return start

    def read(self, start: int) -> None:
        """One of the readers of what is at a place has read it."""
        self._readers[start] -= 1
        if self._readers[start]:
            return
        del self._readers[start]
        length = self._lengths.pop(start)
        after = bisect_left(self._free, (start, 0))
        if after < len(self._free) and self._free[after][0] == start + length:
            length += self._free.pop(after)[1]
        if after and sum(self._free[after - 1]) == start:
            start, before = self._free.pop(after - 1)
            length, after = length + before, after - 1
        self._free.insert(after, (start, length))

    @property
    def occupied(self) -> list[int]:
        """The places of what has yet to be read."""
        return [*self._readers]

    def forget(self) -> None:
        """Nothing more is put here. What others have mapped, they keep."""
        self.bytes = self.bytes[:0].copy()

    def _back(self, stop: int) -> bool:
        """Whether there is memory up to ``stop``."""
        if stop <= self._given:
            return True
        if stop > self._limit:
            return False
        for wanted in (min(max(stop, self._given + _STEP), self._limit), stop):
            with suppress(OSError):
                os.posix_fallocate(self.descriptor, self._given, wanted - self._given)
                self._given = wanted
                return True
        return False


def mapped(descriptor: int, size: int) -> np.ndarray:
    """The bytes of a file, which stay for as long as something refers to them."""
    return np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
