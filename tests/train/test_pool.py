from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.collectives import all_reduce, barrier
from shoal.comm.world import World
from shoal.errors import LayoutError, RankFailed
from shoal.train.pool import Pool

SOON_S = 5.0


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2) as workers:
        yield workers


def total(world: World, each: float = 1.0) -> float:
    value = torch.tensor([each])
    all_reduce(value, world.everyone, "test")
    return value.item()


def fails(pool: Pool, task: Callable[..., Any], *arguments: Any) -> str:
    """The text of the failure, which must come soon; afterwards the pool works."""
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        pool.run(task, *arguments)
    assert time.monotonic() - start < SOON_S
    assert pool.run(total) == [2.0, 2.0]
    return str(caught.value)


def where(world: World) -> tuple[int, int, int]:
    barrier(world.everyone)  # a rank that left at once would cut off those that are still connecting
    return world.rank, world.size, os.getpid()


def test_tasks_run_on_the_same_processes_in_order_of_rank(two: Pool) -> None:
    first, again = two.run(where), two.run(where)
    assert first == again
    assert [place[:2] for place in first] == [(0, 2), (1, 2)]
    assert two.run(where, ranks=1) == [(0, 1, first[0][2])]
    assert os.getpid() not in {pid for _, _, pid in first}
    assert two.run(total, 3.0) == [6.0, 6.0]


def one_raises(world: World, guilty: int, peers: str) -> None:
    if world.rank == guilty:
        time.sleep(0.02)
        raise ValueError("the spoon is bent")
    if peers == "wait":
        total(world)
    time.sleep(60)


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("peers", ["wait", "sleep"])
def test_a_rank_that_raises_ends_all_and_is_named_with_its_traceback(two: Pool, guilty: int, peers: str) -> None:
    """Its peers may fail in their turn, when gloo misses it: that is not what is shown, however often it is tried."""
    for _ in range(3 if peers == "wait" else 1):
        text = fails(two, one_raises, guilty, peers)
        assert text.startswith(f"rank {guilty} raised:")
        assert "in one_raises" in text
        assert text.endswith("ValueError: the spoon is bent")


def one_dies(world: World, by: int, peers: str) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), by)
    if peers == "wait":
        total(world)
    time.sleep(60)


@pytest.mark.parametrize("peers", ["wait", "sleep"])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_is_killed_is_reported_by_its_signal(two: Pool, by: signal.Signals, peers: str) -> None:
    assert f"rank 1 was killed by {by.name}" in fails(two, one_dies, by, peers)


def one_exits(world: World) -> None:
    if world.rank == 0:
        os._exit(7)
    total(world)


def test_a_rank_that_exits_is_reported_by_its_code(two: Pool) -> None:
    assert "rank 0 exited with code 7" in fails(two, one_exits)


def one_refuses(world: World) -> None:
    if world.rank == 1:
        raise LayoutError("tp = 5: does not divide")
    total(world)


def test_an_error_of_the_user_passes_through_as_it_is(two: Pool) -> None:
    with pytest.raises(LayoutError, match="tp = 5: does not divide"):
        two.run(one_refuses)
    assert two.run(total) == [2.0, 2.0]


def unpicklable(world: World) -> object:
    barrier(world.everyone)
    return (lambda: world) if world.rank == 1 else None


def test_a_result_that_cannot_be_sent_is_a_failure_with_its_traceback(two: Pool) -> None:
    assert "rank 1 raised:" in fails(two, unpicklable)


def test_a_rank_that_was_killed_between_tasks_is_replaced() -> None:
    with Pool(2) as pool:
        _, (_, _, idle) = pool.run(where)
        os.kill(idle, signal.SIGKILL)
        while alive(idle):
            time.sleep(0.01)
        assert idle not in [pid for _, _, pid in pool.run(where)]


def idle(world: World) -> None:
    time.sleep(60)


def parent(report: Connection) -> None:
    with Pool(2) as pool:
        report.send([pid for _, _, pid in pool.run(where)])
        pool.run(idle)


def alive(pid: int) -> bool:
    """A process that has ended and not been waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_die_with_their_parent_however_it_dies() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=parent, args=(there,))
    process.start()
    try:
        assert here.poll(20)
        workers = here.recv()
        time.sleep(0.1)  # they are at work
        assert all(alive(pid) for pid in [*workers, process.pid])
    finally:
        process.kill()
        process.join()
    deadline = time.monotonic() + SOON_S
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [pid for pid in workers if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_closing_ends_the_workers() -> None:
    with Pool(2) as pool:
        workers = [pid for _, _, pid in pool.run(where)]
    assert not any(alive(pid) for pid in workers)
