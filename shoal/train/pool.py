"""Local processes that work as the ranks of a world.

They are forked from a process that has imported PyTorch, so that eight of them are there in about a second, and kept
from task to task. The first rank that raises or dies ends them all, and its traceback or signal is what the caller
sees. One that dies cannot say what it was doing: so others say where that left them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.process import die_with, keep_freed_memory
from shoal.comm.world import TIMEOUT_S, World, pick_device
from shoal.errors import RankFailed, ShoalError
from shoal.train.temporary import temporary_folder

_GRACE_S = 0.5
_LAST_WORDS_S = 2.0
"""For ranks that wait for one that died: they notice as soon as they come to that."""


@dataclass(frozen=True)
class _Failure:
    rank: int
    when: float
    text: str
    error: ShoalError | None = None
    died: bool = False
    notes: tuple[str, ...] = ()
    """What was added to the error on its way."""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Causes sort before consequences: a rank that was killed, then errors by time, last those that only say that
        a peer has gone (gloo answers with an error or an abort)."""
        orphaned = any(words in self.text for words in ("by peer", "SIGABRT", "Connection refused"))
        return not self.died, orphaned, self.when


class Pool:
    """``size`` forked processes, for many calls of :meth:`run`; a context manager, or :meth:`close` it."""

    def __init__(self, size: int, *, threads: int = 1) -> None:
        assert size > 0
        self.size, self._threads = size, threads
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(
        self,
        task: Callable[..., Any],
        *arguments: Any,
        ranks: int | None = None,
        timeout_s: float = TIMEOUT_S,
        device: str = "cpu",
        share: bool = True,
    ) -> list[Any]:
        """``task(world, *arguments)`` on each of ``ranks`` processes (all, unless told), each in a world of that size,
        which may ``share`` memory.

        Returns what they return, in order of rank. ``task`` and ``arguments`` must be picklable (a function of a
        module). Raises :class:`RankFailed` with the first failure; a :class:`ShoalError` of a rank is raised as it is.
        """
        ranks = self.size if ranks is None else ranks
        assert 0 < ranks <= self.size
        self._start()
        with temporary_folder("meeting") as folder:
            meeting = str(folder / "store")
            try:
                for rank, (_, pipe) in enumerate(self._workers[:ranks]):
                    pipe.send(rank)
                    pipe.send((task, arguments, ranks, meeting, timeout_s, device, share))
                return self._collect(ranks)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End all processes at once."""
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        if self._workers and all(process.is_alive() for process, _ in self._workers):
            return
        self.close()
        warm()
        context = multiprocessing.get_context("fork")
        for _ in range(self.size):
            here, there = context.Pipe()
            ours = [here, *(pipe for _, pipe in self._workers)]
            process = context.Process(target=_work, args=(there, ours, os.getpid(), self._threads), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def _collect(self, ranks: int) -> list[Any]:
        """Wait on every pipe and every process at once: polling one rank would lose another's traceback."""
        results: dict[int, Any] = {}
        failures: list[_Failure] = []
        deadline: float | None = None
        while len(results) + len({failure.rank for failure in failures}) < ranks:
            settled = results.keys() | {failure.rank for failure in failures}
            sources: dict[Any, int] = {}
            for rank in set(range(ranks)) - settled:
                process, pipe = self._workers[rank]
                sources |= {pipe: rank, process.sentinel: rank}
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(sources), left)
            if not ready:
                break
            for rank in sorted({sources[source] for source in ready}):
                outcome = self._outcome(rank)
                if isinstance(outcome, _Failure):
                    failures.append(outcome)
                    # Others fail in its wake; what came first may be read a moment later.
                    patience_s = _LAST_WORDS_S if outcome.died else _GRACE_S
                    deadline = deadline or time.monotonic() + patience_s
                else:
                    results[rank] = outcome[0]
        if failures:
            raise _first(failures)
        return [results[rank] for rank in range(ranks)]

    def _outcome(self, rank: int) -> _Failure | tuple[Any]:
        process, pipe = self._workers[rank]
        try:
            if pipe.poll():
                received: _Failure | tuple[Any] = pipe.recv()
                return received
        except (EOFError, OSError):
            pass  # the process has ended
        except Exception as error:
            return _Failure(rank, time.monotonic(), f"rank {rank} sent what cannot be read: {error!r}")
        process.join(timeout=_GRACE_S)
        code = process.exitcode
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exited with code {code}"
        )
        if code == -signal.SIGKILL:
            how += " (often the system's answer to memory running out)"
        return _Failure(rank, time.monotonic(), f"rank {rank} {how}", died=code != -signal.SIGABRT)


def warm() -> None:
    """Do once, before forking, what is slow the first time; with one thread, since a child cannot use a forked pool
    of threads."""
    torch.set_num_threads(1)
    norm = torch.nn.RMSNorm(2, device="meta")
    norm(torch.empty(1, 2, device="meta"))
    torch.nn.Embedding(2, 2, device="meta")


def _first(failures: Sequence[_Failure]) -> ShoalError:
    first = min(failures, key=lambda failure: failure.order)
    told = [first.text]
    if first.died:
        told += [f"rank {one.rank}: {', '.join(one.notes)}" for one in failures if one.notes]
    return first.error or RankFailed("\n".join(told))


def _work(pipe: Connection, parents: Sequence[Connection], parent: int, threads: int) -> None:
    """A worker's life: run tasks until the pipe closes. ``parents`` are the parent's ends of pipes, inherited."""
    die_with(parent)
    for end in parents:
        end.close()  # where the kernel does not help, the pipe closes when the parent ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    keep_freed_memory()
    torch.set_num_threads(threads)
    while True:
        rank = -1
        try:
            rank = pipe.recv()
            task, arguments, ranks, meeting, timeout_s, device, share = pipe.recv()
            pipe.send((_run(task, arguments, rank, ranks, meeting, timeout_s, device, share),))
        except BaseException as error:
            if rank < 0 and isinstance(error, EOFError | OSError):
                return
            text = f"rank {rank} raised:\n{traceback.format_exc().rstrip()}"
            own = error if isinstance(error, ShoalError) else None
            failure = _Failure(rank, time.monotonic(), text, own, notes=tuple(getattr(error, "__notes__", ())))
            _report(pipe, failure)


def _report(pipe: Connection, failure: _Failure) -> None:
    with suppress(OSError):
        try:
            pipe.send(failure)
        except (TypeError, AttributeError, ValueError):  # an error that cannot be sent; its text can
            pipe.send(replace(failure, error=None))


def _run(
    task: Callable[..., Any],
    arguments: Sequence[Any],
    rank: int,
    ranks: int,
    meeting: str,
    timeout_s: float,
    device: str,
    share: bool,
) -> Any:
    store = dist.FileStore(meeting, ranks) if ranks > 1 else None
    with World(rank, ranks, store, device=pick_device(device, rank), timeout_s=timeout_s, share=share) as world:
        return task(world, *arguments)
