"""The memory of another process of this machine, read where it lies, where the system permits that.

One copy instead of two: nothing has to be put where others can read it first. Linux has a call for it
(``process_vm_readv``), which it permits between processes of one user, unless it has been told otherwise. What lies in
a region (:mod:`.regions`) is mapped, and not copied at all.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from shoal.comm.backends.parcel import Lent
from shoal.comm.backends.regions import Regions

_AT_ONCE = 1 << 18
"""Bytes that stay in a cache until they have been added to others."""
_READ = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
_PR_SET_PTRACER, _ANY = 0x59616D61, (1 << 64) - 1


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Neighbour:
    """The process ``number``, which is ``rank``. Whatever is to be read is there until it has been: an error says that
    the process has gone."""

    def __init__(self, rank: int, number: int) -> None:
        self._rank, self._number = rank, number
        self._mapped: dict[int, np.ndarray] = {}
        self._scratch = np.empty(_AT_ONCE, dtype=np.uint8)

    def lent(self, region: int, place: int, length: int) -> Lent:
        """Bytes at a place in a region there, named by its descriptor, or at an address, in region −1."""
        if region < 0:
            return _Elsewhere(self, place, length, self._scratch)
        return _Here(self._region(region)[place : place + length])

    def read(self, address: int, into: np.ndarray) -> None:
        """Copy what is at an address there."""
        at = 0
        while at < len(into):
            here = _Span(into.ctypes.data + at, len(into) - at)
            there = _Span(address + at, len(into) - at)
            read = _READ(self._number, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) if _READ is not None else -1
            if read <= 0:
                raise self._gone(os.strerror(ctypes.get_errno()))
            at += read

    def forget(self, region: int) -> None:
        """It has gone there."""
        self._mapped.pop(region, None)

    def _region(self, descriptor: int) -> np.ndarray:
        if descriptor not in self._mapped:
            try:
                opened = os.open(f"/proc/{self._number}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    self._mapped[descriptor] = np.frombuffer(mmap.mmap(opened, 0), dtype=np.uint8)
                finally:
                    os.close(opened)
            except (OSError, ValueError) as error:
                raise self._gone(str(error)) from error
        return self._mapped[descriptor]

    def _gone(self, why: str) -> RuntimeError:
        return RuntimeError(f"the connection to rank {self._rank} was closed by peer: its memory cannot be read: {why}")


class _Elsewhere:
    """At an address in the other process."""

    at_once = _AT_ONCE

    def __init__(self, owner: Neighbour, address: int, length: int, scratch: np.ndarray) -> None:
        self._owner, self._address, self.length, self._scratch = owner, address, length, scratch

    def copy_to(self, into: np.ndarray) -> None:
        self._owner.read(self._address, into)

    def look_at(self, start: int, stop: int) -> np.ndarray:
        into = self._scratch[: stop - start]
        self._owner.read(self._address + start, into)
        return into


class _Here:
    """Mapped in this process too."""

    at_once = 4 * _AT_ONCE

    def __init__(self, view: np.ndarray) -> None:
        self._view, self.length = view, len(view)

    def copy_to(self, into: np.ndarray) -> None:
        into[:] = self._view

    def look_at(self, start: int, stop: int) -> np.ndarray:
        return self._view[start:stop]


class Token:
    """Something that only this process has: whoever reads it is on this machine, has the right process, and may."""

    def __init__(self, regions: Regions) -> None:
        """Raises ``OSError`` where the system has no regions."""
        self._value = regions.allocate(16)
        self._value[:] = np.frombuffer(os.urandom(16), dtype=np.uint8)
        address = self._value.ctypes.data
        region = regions.find(address, 16)
        assert region is not None, "it has just been made"
        self.text = f"{os.getpid()} {address} {region[0]} {self._value.tobytes().hex()}"
        # Some systems permit it to a process's ancestors alone, unless that process has no objection.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANY), 0, 0, 0)


def found(rank: int, token: str) -> Neighbour | None:
    """Who has the token that ``rank`` has told, if its memory can be read."""
    process, address, region, value = token.split()
    neighbour, there = Neighbour(rank, int(process)), np.zeros(16, dtype=np.uint8)
    try:
        neighbour.read(int(address), there)
        mapped = neighbour.lent(int(region), 0, 16).look_at(0, 16)
    except RuntimeError:
        return None
    return neighbour if there.tobytes().hex() == mapped.tobytes().hex() == value else None
