"""A file on this machine's disk that holds what memory has no room for.

Direct I/O moves bytes between the disk and the caller's memory without a copy in the page cache, which would take the
very memory that was to be spared. A transfer is divided over a few threads, each with one block under way at a time: a
disk needs several to be fast, and the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import ConfigError, ShoalError
from shoal.sizes import size_text

SECTOR = 4096
"""What offsets, sizes and addresses are multiples of, in bytes: no disk asks for more."""
BLOCK = 1 << 20
"""Bytes that one call moves."""

_Call = Callable[[int, Sequence[memoryview], int], int]


class SwapFailed(ShoalError):
    """The disk has no room, does not answer, or lost what was written."""

    exit_code = 1


def check_folder(folder: Path) -> None:
    """See that ``folder`` can have a swap file. Raises :class:`~shoal.errors.ConfigError`."""
    try:
        SwapFile(folder, SECTOR).close()
    except SwapFailed as error:
        raise ConfigError(str(error)) from error


class Transfer:
    """Bytes on their way. Until :meth:`wait` returns, their memory must be left alone."""

    def __init__(self, parts: Sequence[Future[None]]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Until none is under way. Raises :class:`SwapFailed`."""
        wait(self._parts)  # all of them: also after an error, memory must not be written to any more
        for part in self._parts:
            part.result()


class SwapFile:
    """``nbytes`` on the disk of ``folder``, all taken at once, so that a disk without room for them is found now.

    The file has no name (where that cannot be, it loses it at once), so it goes with the process, however that ends.
    ``direct`` says whether the page cache is passed by; some filesystems do not let it. Offsets, sizes in bytes and
    addresses are multiples of ``SECTOR``. Transfers that overlap, in the file or in memory, must not be under way
    together. Raises :class:`SwapFailed`.
    """

    def __init__(self, folder: Path, nbytes: int, *, threads: int = 4) -> None:
        assert nbytes > 0
        assert nbytes % SECTOR == 0
        self._folder, self._nbytes, self._threads = folder, nbytes, threads
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise SwapFailed(f"{folder}: no file can be made here: {error.strerror}; {_A_FOLDER}") from error
        try:
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            self._file.close()
            free = shutil.disk_usage(folder).free
            raise SwapFailed(
                f"{folder}: a swap file of {size_text(nbytes)} cannot be had: {error.strerror} "
                f"({size_text(free)} are free); {_OTHER_FOLDER}"
            ) from error
        self.direct = _pass_the_page_cache_by(self._file.fileno())
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="swap")
        self._mapping: Tensor | None = None

    def read(self, offset: int, into: Tensor) -> Transfer:
        """Start to read ``into``, a contiguous CPU tensor of any dtype."""
        return self._start(os.preadv, offset, into)

    def write(self, offset: int, data: Tensor) -> Transfer:
        """Start to write ``data``, a contiguous CPU tensor of any dtype."""
        return self._start(os.pwritev, offset, data)

    def mapping(self) -> Tensor:
        """The file as a tensor of bytes, which reads and writes it through the page cache: slow, and for when no
        transfer is under way. The disk's failures are signals there (SIGBUS), not exceptions."""
        if self._mapping is None:
            size = os.fstat(self._file.fileno()).st_size
            if size < self._nbytes:
                raise self._ended(size)
            self._mapping = torch.frombuffer(mmap.mmap(self._file.fileno(), self._nbytes), dtype=torch.uint8)
        return self._mapping

    @property
    def mapped(self) -> bool:
        """Whether :meth:`mapping` has been asked for."""
        return self._mapping is not None

    def close(self) -> None:
        """Finish what is under way and give up the disk's space."""
        self._pool.shutdown()
        self._mapping = None
        self._file.close()

    def _start(self, call: _Call, offset: int, tensor: Tensor) -> Transfer:
        assert tensor.is_cpu
        assert tensor.is_contiguous()
        assert all(number % SECTOR == 0 for number in (offset, tensor.nbytes, tensor.data_ptr()))
        assert offset + tensor.nbytes <= self._nbytes
        data = _bytes_of(tensor)
        stretch = max(1, -(-len(data) // (BLOCK * self._threads))) * BLOCK
        return Transfer(
            [
                self._pool.submit(self._move, call, data[at : at + stretch], offset + at)
                for at in range(0, len(data), stretch)
            ]
        )

    def _move(self, call: _Call, data: memoryview, offset: int) -> None:
        while data:
            try:
                moved = call(self._file.fileno(), [data[:BLOCK]], offset)
            except OSError as error:
                verb = "written" if call is os.pwritev else "read"
                advice = _OTHER_FOLDER if error.errno in (errno.ENOSPC, errno.EDQUOT) else _CHECK_DISK
                raise SwapFailed(
                    f"{self._folder}: the swap file cannot be {verb} at byte {offset}: {error.strerror}; {advice}"
                ) from error
            if self.direct:
                moved -= moved % SECTOR  # it cannot go on from anywhere else
            if not moved:
                raise self._ended(offset)
            data, offset = data[moved:], offset + moved

    def _ended(self, offset: int) -> SwapFailed:
        return SwapFailed(
            f"{self._folder}: the swap file ends at byte {offset} of {self._nbytes}, something has cut it; "
            f"{_CHECK_DISK}"
        )


_A_FOLDER = "name a folder of this machine that exists and may be written to (memory.swap)"
_OTHER_FOLDER = "name a folder on a disk with more room (memory.swap), or keep less on it (layout.offload)"
_CHECK_DISK = "check this disk, and go on from the last checkpoint with a folder (memory.swap) on another"


def _pass_the_page_cache_by(descriptor: int) -> bool:
    """Turn direct I/O on, if the filesystem has it: some refuse the mode, some only when it is used."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, SECTOR) as page:
            os.preadv(descriptor, [page], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
