"""The same command joins the ranks that torchrun or Slurm has started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from whole_runs import (
    COMMAND,
    Apart,
    Ended,
    Shoal,
    alive,
    children,
    ended,
    events,
    flip,
    make_store,
    sets,
    until,
    write_run,
)

from shoal import checkpoint
from shoal.data.batches import Batch
from shoal.engine import Engine, StepResult

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
SHORT = sets(run__steps=6, checkpoint__every=2)
CRASH = """
from shoal.engine import Engine
step = Engine.step
def faulty(self, batch):
    if self.world.rank == 1 and self.steps_done == 3:
        raise ValueError("planted")
    return step(self, batch)
Engine.step = faulty
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


@pytest.fixture
def file(store: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path, store)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "out" / "run"


@pytest.fixture(scope="module")
def alone(store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, str]]:
    """The course of the run with two processes of its own."""
    folder = tmp_path_factory.mktemp("alone")
    assert Apart(["train", write_run(folder, store), "-n", 2, *SHORT], folder / "said").end(30).code == 0
    return course(folder / "out" / "run")


def course(run: Path) -> list[tuple[float, str]]:
    return [(values["loss"], values["hash"]) for values in events(run, "step")]


def torchrun(arguments: list[object], folder: Path, plant: str = "") -> Ended:
    script = folder / "shoal_script.py"
    script.write_text(f"{plant}\n{COMMAND}\n", encoding="utf-8")
    command = [*TORCHRUN, str(script), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    return Ended(result.returncode, result.stdout, result.stderr)


def slurm(
    arguments: list[object], folder: Path, seconds: float = 30, plant: Callable[[], None] = lambda: None
) -> list[Ended]:
    """Two processes in the environment that Slurm gives its tasks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def environment(rank: int) -> Callable[[], None]:
        def put() -> None:
            os.environ |= {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            plant()

        return put

    tasks = [Apart(arguments, folder / f"task-{rank}", environment(rank)) for rank in range(2)]
    with ended([task.pid for task in tasks]):
        return [task.end(seconds) for task in tasks]


def crash() -> None:
    step = Engine.step

    def faulty(self: Engine, batch: Batch) -> StepResult:
        if self.world.rank == 1 and self.steps_done == 3:
            raise ValueError("planted")
        return step(self, batch)

    Engine.step = faulty  # type: ignore[method-assign]


def test_torchrun_gives_the_same_run_and_one_rank_prints(
    file: Path, run: Path, tmp_path: Path, alone: list[tuple[float, str]]
) -> None:
    result = torchrun(["train", file, *SHORT], tmp_path)
    assert result.code == 0
    assert course(run) == alone
    lines = result.out.splitlines()
    assert len([line for line in lines if line.startswith("step 6/6")]) == 1
    assert len([line for line in lines if "done" in line]) == 1
    assert "on 2 processes" in lines[0]
    assert "Traceback" not in result.err


def test_a_crash_under_torchrun_shows_its_traceback(file: Path, run: Path, tmp_path: Path) -> None:
    result = torchrun(["train", file, *SHORT], tmp_path, CRASH)
    assert result.code != 0
    assert "ValueError: planted" in result.err
    found = checkpoint.latest(run)
    assert found is not None
    assert found.name == "step-00000002"


def test_an_error_of_all_ranks_is_told_once_under_torchrun(file: Path, run: Path, tmp_path: Path) -> None:
    result = torchrun(["train", file, "--set", "run.stepps=3"], tmp_path)
    assert result.code != 0
    assert result.err.count("error: run.stepps: unknown key (did you mean 'steps'?)") == 1
    assert "rank 1: run.stepps" not in result.err
    assert not run.parent.exists()


def test_slurm_gives_the_same_run_and_one_rank_prints(
    file: Path, run: Path, tmp_path: Path, alone: list[tuple[float, str]]
) -> None:
    first, second = slurm(["train", file, *SHORT], tmp_path)
    assert (first.code, first.err) == (0, "")
    assert "step 6/6" in first.out
    assert second == Ended(0, "", "")
    assert course(run) == alone


def test_a_fault_that_the_first_rank_finds_ends_all_and_is_told_once(file: Path, run: Path, tmp_path: Path) -> None:
    first, second = slurm(["train", file, "--set", f"data.path={tmp_path / 'nowhere'}"], tmp_path)
    assert first.code == 2
    assert first.err.startswith(f"error: data.path = {tmp_path / 'nowhere'}: there is no token store; ")
    assert second == Ended(2, "", "")
    assert not run.parent.exists()


def test_a_crash_of_one_task_ends_the_other(file: Path, tmp_path: Path) -> None:
    first, second = slurm(["train", file, *SHORT], tmp_path, plant=crash)
    assert first.code != 0
    assert second.code != 0
    assert "ValueError: planted" in second.err


def test_a_damaged_checkpoint_is_told_by_the_first_rank_at_once(file: Path, run: Path, tmp_path: Path) -> None:
    assert slurm(["train", file, *SHORT], tmp_path)[0].code == 0
    shard = run / "step-00000006" / "rank-00001.safetensors"
    flip(shard)
    first, second = slurm(["train", file, *SHORT], tmp_path)
    assert (first.code, second.code) == (2, 2)
    assert f"{shard}: damaged: its checksum is" in first.err
    assert second.err.startswith("error: rank 1: ")
    assert "Traceback" not in first.err + second.err


def test_tasks_whose_reader_leaves_end_with_one_message(file: Path, tmp_path: Path) -> None:
    first, second = slurm(["train", file, *SHORT, "--json"], tmp_path, plant=no_reader)
    assert (first.code, second.code != 0) == (1, True)
    assert first.err == "error: standard output was closed, so nobody could see how the run goes on\n"


def no_reader() -> None:
    here, there = os.pipe()
    os.close(here)
    os.dup2(there, 1)


def test_a_slurm_job_of_one_task_starts_its_own_processes(
    file: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert Shoal(capfd, monkeypatch)("train", file, "-n", 2, *sets(run__steps=1)).code == 0
    assert events(run, "start")[0]["ranks"] == 2


@pytest.mark.parametrize(
    ("world", "arguments", "words"),
    [
        ("3", [], ["layout.dp = 2: dp·cp·tp·pp = 2 ranks, but the world has 3", "2 ranks"]),
        ("2", ["-n", "3"], ["-n = 3: the launcher has started 2", "use -n 2"]),
        ("two", [], ["WORLD_SIZE = two: not a whole number", "launcher"]),
    ],
)
def test_a_world_that_does_not_fit_is_refused_before_the_ranks_meet(
    file: Path, run: Path, world: str, arguments: list[str], words: list[str],
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world)
    result = Shoal(capfd, monkeypatch)("train", file, *arguments)
    assert result.code == 2
    assert not run.parent.exists()
    for word in words:
        assert word in result.err


@pytest.mark.slow
def test_no_task_outlives_torchrun_that_is_ended(file: Path, run: Path, tmp_path: Path) -> None:
    script = tmp_path / "shoal_script.py"
    script.write_text(COMMAND, encoding="utf-8")
    endless = sets(run__steps=100_000, checkpoint__every=1)
    agent = subprocess.Popen([*TORCHRUN, script, "train", file, *endless], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: checkpoint.latest(run) is not None, 60)
        tasks = children(agent.pid)
        agent.terminate()
        agent.communicate(timeout=10)
        assert agent.returncode != 0
        assert not any(map(alive, tasks))
    finally:
        agent.kill()
