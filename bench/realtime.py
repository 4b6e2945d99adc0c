"""Real-time scheduling, so that whatever else runs on the machine does not interrupt a timed step."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIORITY = 10
PATIENCE_S = 5
"""For how long a thread may run without ever waiting: one that spins would take the machine from everyone."""

SHARE = 0.1
"""Of its time, what a process under real-time scheduling leaves to others (:func:`rest`): twice what they are due."""


def rest(busy_s: float) -> None:
    """Leave the processor to others for their share of the ``busy_s`` seconds since the last rest.

    The kernel gives ordinary processes 50 ms of each second, whatever the priority of those that keep them waiting: if
    not between two timed steps, then in the middle of one.
    """
    time.sleep(SHARE * busy_s)


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
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        for thread in _threads():
            priority = PRIORITY + ahead * (thread != os.getpid())
            os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))
    try:
        yield
    finally:
        if realtime:
            for thread in _threads():
                os.sched_setscheduler(thread, *before)
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
