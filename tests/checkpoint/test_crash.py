"""Processes killed in the middle of a save: what is then the latest is one whole step, and no older than before."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoint_ranks import FORK, folders, held, wrong

from shoal.checkpoint import latest, load, save
from shoal.comm.world import World

CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "close")


def loaded(folder: Path) -> int:
    """Load the latest of ``folder`` and return which generation it is, having checked that it is one and whole."""
    fragments = held("whole", 0, 1, None)
    _, meta = load(folder, fragments, World())
    assert not wrong(fragments, meta["generation"])
    return int(meta["generation"])


def saved(folder: Path, step: int, generation: int, world: World) -> None:
    save(folder, step, held("rows", world.rank, world.size, generation), {"generation": generation}, world, keep=2)


def in_child(work: Callable[[], Any]) -> int:
    process = FORK.Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def kill_at(deadline: int) -> None:
    """Let this process kill itself just before its ``deadline``-th call that changes the file system."""
    count = iter(range(1, deadline + 1))

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(count) == deadline:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))


def test_killed_before_each_change_of_the_file_system(tmp_path: Path) -> None:
    """Step 2 is saved again, then step 3, with two kept: a replacement, a new step and a deletion."""
    for deadline in range(1, 200):
        run = tmp_path / str(deadline)
        for step in (1, 2):
            saved(run, step, step, World())

        def work(deadline: int = deadline, run: Path = run) -> None:
            kill_at(deadline)
            saved(run, 2, 3, World())
            (run / "between").touch()
            saved(run, 3, 4, World())

        ended = in_child(work)
        generation = loaded(run)
        assert generation in ((3, 4) if (run / "between").exists() else (2, 3))
        saved(run, 4, 5, World())
        assert loaded(run) == 5
        assert len(folders(run / "step-00000004")) == 2
        names = set(folders(run)) - {"between"}
        assert names <= {"latest", "step-00000002", "step-00000003", "step-00000004"}
        assert len(names) == 3
        if ended == 0:
            break
    assert ended == 0, "the last run was to finish"
    assert deadline > 25, "few points were tried: are the calls still made through os?"


def endless(rank: int, store: str, folder: Path, first: int) -> None:
    with World(rank, 2, dist.FileStore(store, 2)) as world:
        for step in range(first, first + 10_000):
            saved(folder, step, step, world)


def test_all_ranks_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    run, draw, before = tmp_path / "run", random.Random(7), 0
    for attempt in range(20):
        store = str(tmp_path / f"store-{attempt}")
        ranks = [FORK.Process(target=endless, args=(rank, store, run, before + 1)) for rank in range(2)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 30
        while (found := latest(run)) is None or found.name == f"step-{before:08d}":
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.04))
        for process in draw.sample(ranks, 2):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            process.join(10)
        after = loaded(run)
        assert after > before
        before = after
