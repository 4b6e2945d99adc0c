"""Real-time scheduling, so that whatever else runs on the machine does not interrupt a timed step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIORITY = 10


@contextmanager
def scheduling(realtime: bool) -> Iterator[None]:
    """Run all threads of this process under SCHED_FIFO, if asked, and as before afterwards.

    Threads other than the main one (gloo's) stand one step above it: they sleep until a message comes, and at the same
    priority would then wait until the computation pauses, so that nothing overlapped.
    """
    if realtime:
        for thread in _threads():
            os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(PRIORITY + (thread != os.getpid())))
    try:
        yield
    finally:
        if realtime:
            for thread in _threads():
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def permitted() -> bool:
    """Whether this process may use real-time scheduling."""
    try:
        with scheduling(True):
            return True
    except (PermissionError, AttributeError):  # AttributeError: not on this system
        return False


def _threads() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]
