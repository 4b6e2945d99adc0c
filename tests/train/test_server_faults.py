"""A server or a worker fails: the run ends and says which."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_runs import loads, under_way
from whole_runs import Apart, alive, ended, make_store, sets, write_run

from shoal.data_parallel.server import Server


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


@pytest.fixture
def file(store: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path, store)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "out" / "run"


def killed_at_step_3(rank: int) -> Callable[[], None]:
    """A plant of the end of a rank in its fourth step, when it has pushed some gradients."""

    def plant() -> None:
        send = Server._send

        def faulty(self: Server, number: int) -> None:
            send(self, number)
            sent[number] += 1
            if self._mesh.world.rank == rank and sent[number] == 4:
                os.kill(os.getpid(), signal.SIGKILL)

        sent: Counter[int] = Counter()
        Server._send = faulty  # type: ignore[method-assign]

    return plant


@pytest.mark.parametrize("rank", [0, 1], ids=["server", "worker"])
@pytest.mark.parametrize("stale", [0, 1])
def test_a_server_or_a_worker_that_is_killed_ends_the_run(
    file: Path, run: Path, tmp_path: Path, stale: int, rank: int
) -> None:
    line = f"dp=2,sync=server{{stale={stale}}},dtype=float64"
    shoal = Apart(
        ["train", file, "--layout", line, *sets(checkpoint__every=2)], tmp_path / "said", killed_at_step_3(rank)
    )
    with ended([shoal.pid, *(ranks := shoal.ranks())]):
        under_way(run, 2)
        result = shoal.end(10)
        assert result.code == 1
        assert not any(map(alive, ranks))
    assert f"rank {rank} was killed by SIGKILL" in result.err
    assert result.err.count("error:") == 1
    assert loads(run) == 2
