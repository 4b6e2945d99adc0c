"""Real-time scheduling, so that whatever else runs on the machine does not interrupt a timed step."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIORITY = 10
PATIENCE_S = 5
"""For how long a thread may run without ever waiting: one that spins would take the machine from everyone."""


@contextmanager
def scheduling(realtime: bool, *, ranks: int = 1, ahead: int = 1) -> Iterator[None]:
    """Run all threads of this process, one of ``ranks``, under SCHED_FIFO, if asked, and as before afterwards; but
    where they have no core each, as always (see :func:`cores_for`).

    Threads other than the main one (gloo's) stand ``ahead`` steps above it: they sleep until a message comes, and at
    the same priority would then wait until the computation pauses, so that nothing overlapped. But such a thread also
    spins while the main one holds the lock of a connection, and may have put it to sleep: with more ranks than cores,
    for ever. Where stages sleep instead of computing, 0 does not have this danger, and costs nothing.
    """
    realtime = realtime and cores_for(ranks)
    if realtime:
        limits = resource.getrlimit(resource.RLIMIT_RTTIME)
        resource.setrlimit(resource.RLIMIT_RTTIME, (PATIENCE_S * 1_000_000, limits[1]))
        for thread in _threads():
            priority = PRIORITY + ahead * (thread != os.getpid())
            os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))
    try:
        yield
    finally:
        if realtime:
            for thread in _threads():
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            resource.setrlimit(resource.RLIMIT_RTTIME, limits)


def permitted() -> bool:
    """Whether this process may use real-time scheduling."""
    try:
        with scheduling(True):
            return True
    except (PermissionError, AttributeError):  # AttributeError: not on this system
        return False


def cores_for(ranks: int) -> bool:
    """Whether each of ``ranks`` processes has a core. If not, one that waits for another by looking again and again
    keeps it from the core that it needs, until the system ends both (SIGXCPU)."""
    return ranks <= len(os.sched_getaffinity(0))


def words_for(realtime: bool, asked: bool) -> str:
    """How this was scheduled, where that was ``asked``."""
    return (
        "SCHED_FIFO" if realtime else "ordinary" + " (SCHED_FIFO is not permitted, or ranks have no core each)" * asked
    )


def _threads() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]
