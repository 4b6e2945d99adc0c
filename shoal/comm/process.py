"""What a process of a run asks of its system."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_LARGE_BYTES = 32 << 20
_SMALL_BYTES = 1 << 20


def keep_freed_memory() -> None:
    """Have the C library keep up to 1 GiB of freed memory in this process instead of returning it to the system.

    A backward pass frees what the next step allocates again; returned, each page would be faulted in and zeroed anew
    (thousands of faults, some per cent of a step). Does nothing where the C library is not glibc.
    """
    _set_malloc(_KEPT_BYTES, _LARGE_BYTES)


def return_freed_memory() -> None:
    """The opposite of :func:`keep_freed_memory`, where memory is what there is least of: from here on freed blocks of a
    mebibyte or more go back to the system, and no holes stay between them."""
    _set_malloc(_SMALL_BYTES, _SMALL_BYTES)


def _set_malloc(kept: int, large: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(_M_TRIM_THRESHOLD, kept)
            libc.mallopt(_M_MMAP_THRESHOLD, large)


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent, process ``parent``, ends, however that ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
