"""Activations in a file on this machine's disk.

They pass through buffers of the host. On their way out they are copied there while their unit runs, written while the
next one does, and leave the buffer when the one after that begins; on their way back they are read two units ahead and
copied to the device one ahead. What is asked for before it has been written comes from its buffer, and what nobody
needs any more by then is never written.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from shoal.memory.buffers import ALIGNMENT, Buffers
from shoal.memory.copies import Copies
from shoal.memory.on_host import Arriving, room
from shoal.memory.swap import SwapFailed, SwapFile, Transfer

LEAST_FILE = 1 << 26
"""Bytes of the first file."""


class Files:
    """Places in files in ``folder``, which nobody else sees and which go with the process. Together they grow to twice
    what is there at the same time, or ``LEAST_FILE``: each new one is as large as all before it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: dict[int, list[Place]] = defaultdict(list)
        self._newest: SwapFile | None = None
        self._begin = self._end = self._total = 0

    def take(self, nbytes: int) -> Place:
        """A place of ``nbytes``, a multiple of ``ALIGNMENT``. Raises :class:`~shoal.memory.swap.SwapFailed`."""
        if free := self._free[nbytes]:
            return free.pop()
        if self._newest is None or self._begin + nbytes > self._end:
            size = max(LEAST_FILE, self._total, nbytes)
            self._newest, self._begin, self._end = SwapFile(self._folder, size), 0, size
            self._total += size
        place = Place(self._newest, self._begin, nbytes)
        self._begin += nbytes
        return place

    def give(self, place: Place) -> None:
        """Return what :meth:`take` gave."""
        self._free[place.nbytes].append(place)


class Place:
    """``nbytes`` of a file from byte ``offset`` on."""

    def __init__(self, file: SwapFile, offset: int, nbytes: int) -> None:
        self._file, self._offset, self.nbytes = file, offset, nbytes

    def write(self, data: Tensor) -> Transfer:
        return self._file.write(self._offset, data)

    def read(self, into: Tensor) -> Transfer:
        return self._file.read(self._offset, into)


class OnDisk:
    """Takes the activations of a ``device`` to files in ``folder``, and back (see :mod:`shoal.memory.activations`)."""

    ahead = 2

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device, self.copies, self.files = device, Copies(device), Files(folder)
        SwapFile(folder, ALIGNMENT).close()  # what cannot be had, a run is to know before it begins
        self.buffers = Buffers(pinned=self.copies.pinned)
        self._copied: list[weakref.ref[_Away]] = []
        self._written: list[weakref.ref[_Away]] = []
        self._read: list[weakref.ref[_Reading]] = []
        self._leaving: list[tuple[torch.cuda.Event, Tensor]] = []
        """Buffers that a copy still reads or writes."""

    def put(self, data: Tensor) -> _Away:
        away = _Away(self, data)
        self._copied.append(weakref.ref(away))
        return away

    def next_unit(self) -> None:
        copied, written, read, leaving = self._copied, self._written, self._read, self._leaving
        self._copied, self._written, self._read, self._leaving = [], copied, [], []
        for event, buffer in leaving:
            event.synchronize()  # since a unit ago
            self.buffers.give(buffer)
        for away in _alive(written):
            away.leave_buffer()
        for away in _alive(copied):
            away.write()
        for each in read:
            if (reading := each()) is not None:
                reading.lift()

    def read(self, away: _Away) -> _Reading:
        """Begin to bring it back."""
        reading = _Reading(self, away)
        self._read.append(weakref.ref(reading))
        return reading

    def give(self, buffer: Tensor, after: torch.cuda.Event | None) -> None:
        """A buffer is free after that."""
        if after is None:
            self.buffers.give(buffer)
        else:
            self._leaving.append((after, buffer))


def _alive(those: Iterable[weakref.ref[_Away]]) -> Iterator[_Away]:
    return (one for each in those if (one := each()) is not None)


class _Away:
    """A storage that has gone: in a buffer first, then in a place as well, at last in the place alone."""

    def __init__(self, disk: OnDisk, data: Tensor) -> None:
        self._disk, self.nbytes = disk, len(data)
        self.buffer: Tensor | None = disk.buffers.take(-(-self.nbytes // ALIGNMENT) * ALIGNMENT)
        self._copy = disk.copies.start(self.buffer[: self.nbytes], data)
        self.last_use = self._copy.event
        """The last copy out of the buffer, or into it."""
        self.place: Place | None = None
        self._transfer: Transfer | None = None

    def write(self) -> None:
        """Begin to write what is in the buffer."""
        assert self.buffer is not None
        self._copy.wait()
        self.place = self._disk.files.take(len(self.buffer))
        self._transfer = self.place.write(self.buffer)

    def leave_buffer(self) -> None:
        """Once it is written."""
        if self._transfer is not None:
            self._transfer.wait()
        self._transfer = None
        if self.buffer is not None:
            self._disk.give(self.buffer, self.last_use)
        self.buffer = None

    def fetch(self) -> _Reading:
        return self._disk.read(self)

    def __del__(self) -> None:
        with suppress(SwapFailed):  # nobody needs it any more
            if self._transfer is not None:
                self._transfer.wait()
        if self.buffer is not None:
            self._disk.give(self.buffer, self.last_use)
        if self.place is not None:
            self._disk.files.give(self.place)


class _Reading:
    """A storage on its way back: from its buffer, or by way of another one."""

    def __init__(self, disk: OnDisk, away: _Away) -> None:
        self._disk, self._away = disk, away
        self._buffer: Tensor | None = None
        self._arriving: Arriving | None = None
        if away.buffer is not None:
            self._copy(away.buffer, away.last_use)
        else:
            assert away.place is not None
            self._buffer = disk.buffers.take(away.place.nbytes)
            self._transfer = away.place.read(self._buffer)

    def lift(self) -> None:
        """Begin to copy it to the device, once it is read."""
        if self._buffer is not None:
            self._transfer.wait()
            buffer, self._buffer = self._buffer, None
            self._disk.give(buffer, self._copy(buffer))

    def wait(self) -> Tensor:
        self.lift()
        assert self._arriving is not None
        return self._arriving.wait()

    def _copy(self, buffer: Tensor, after: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        here = room(self._away.nbytes, self._disk.device)
        copy = self._disk.copies.start(here, buffer[: self._away.nbytes], after)
        self._arriving = Arriving(here, copy)
        if buffer is self._away.buffer:
            self._away.last_use = copy.event
        return copy.event

    def __del__(self) -> None:
        if self._buffer is not None:
            with suppress(SwapFailed):
                self._transfer.wait()
            self._disk.buffers.give(self._buffer)
