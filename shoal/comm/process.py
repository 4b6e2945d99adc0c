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


def keep_freed_memory() -> None:
    """Have the C library keep up to 1 GiB of freed memory in this process instead of returning it to the system.

    A backward pass frees what the next step allocates again; returned, each page would be faulted in and zeroed anew
    (thousands of faults, some per cent of a step). Does nothing where the C library is not glibc.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
            libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent, process ``parent``, ends, however that ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
