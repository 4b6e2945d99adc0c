"""A parameter server, or a rank that it serves, is killed in the middle of a step: the run ends and says so."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from whole_runs import Apart, alive, ended, make_store, sets, until, write_run

from shoal import checkpoint
from shoal import config as configuration
from shoal.comm.world import World
from shoal.data_parallel.server import Server
from shoal.layout import Layout
from shoal.train.setup import make_engine


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


def killed_in_step_4(rank: int) -> Callable[[], None]:
    """A plant of the end of a rank when it has pushed some gradients of its fourth step."""

    def plant() -> None:
        send, sent = Server._send, Counter[int]()

        def faulty(self: Server, number: int) -> None:
            send(self, number)
            sent[number] += 1
            if self._mesh.world.rank == rank and sent[number] == 4:
                os.kill(os.getpid(), signal.SIGKILL)

        Server._send = faulty  # type: ignore[method-assign]

    return plant


@pytest.mark.parametrize("rank", [0, 1], ids=["server", "served"])
@pytest.mark.parametrize("stale", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_and_is_named(store: Path, tmp_path: Path, stale: int, rank: int) -> None:
    """What it has saved before is good."""
    line = f"dp=2,sync=server{{stale={stale}}},dtype=float64"
    command = ["train", write_run(tmp_path, store), "--layout", line, *sets(checkpoint__every=2)]
    shoal, run = Apart(command, tmp_path / "said", killed_in_step_4(rank)), tmp_path / "out" / "run"
    with ended([shoal.pid, *(ranks := shoal.ranks())]):
        until(lambda: checkpoint.latest(run) is not None, 60)
        result = shoal.end(10)
        assert result.code == 1
        assert not any(map(alive, ranks))
    assert f"rank {rank} was killed by SIGKILL" in result.err
    assert result.err.count("error:") == 1
    found = checkpoint.latest(run)
    assert found is not None
    checkpoint.verify(found)
    engine = make_engine(configuration.load(run / "run.toml"), Layout.parse("dtype=float64"), World())
    engine.load(found)
    assert engine.steps_done == 2
