"""One rank fails, or somebody ends the run: every process ends, says why, and leaves a checkpoint that loads."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from torch import Tensor
from whole_runs import COMMAND, Apart, Ended, Shoal, alive, ended, events, make_store, sets, until, write_run

from shoal import checkpoint
from shoal import config as configuration
from shoal.comm.world import World
from shoal.data.batches import Batch
from shoal.engine import Engine, StepResult
from shoal.errors import ConfigError
from shoal.layout import Layout
from shoal.model.decoder import FeedForward
from shoal.train.folder import occupy
from shoal.train.setup import make_engine

ENDLESS = sets(run__steps=100_000, checkpoint__every=1, data__validation=0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


@pytest.fixture
def file(store: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path, store)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "out" / "run"


def at_step_3(fault: Callable[[], object]) -> Callable[[], None]:
    """A plant of ``fault`` in the fourth step of rank 1."""

    def plant() -> None:
        step = Engine.step

        def faulty(self: Engine, batch: Batch) -> StepResult:
            if self.world.rank == 1 and self.steps_done == 3:
                fault()
            return step(self, batch)

        Engine.step = faulty  # type: ignore[method-assign]

    return plant


def raise_it() -> NoReturn:
    raise ValueError("planted in [rank] 1")


def saved_step(run: Path) -> int:
    """The step of the latest checkpoint; 0 before the first."""
    found = checkpoint.latest(run)
    return int(found.name.removeprefix("step-").removesuffix(".old")) if found else 0


def under_way(run: Path, step: int = 3) -> None:
    """Wait until the run has saved ``step``."""
    until(lambda: saved_step(run) >= step, 60)


def loads(run: Path) -> int:
    """Load the latest checkpoint whole, into an engine; returns its step."""
    config = configuration.load(run / "run.toml")
    engine = make_engine(config, Layout.parse("dtype=float64"), World())
    found = checkpoint.latest(run)
    assert found is not None
    checkpoint.verify(found)
    engine.load(found)
    assert saved_step(run) == engine.steps_done
    return engine.steps_done


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (raise_it, ["rank 1 raised:", "Traceback", "in raise_it", "ValueError: planted in [rank] 1"]),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), ["rank 1 was killed by SIGKILL"]),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), ["rank 1 was killed by SIGTERM"]),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), ["rank 1 was killed by SIGSEGV"]),
        (lambda: os._exit(0), ["rank 1 exited with code 0"]),
    ],
    ids=["raises", "SIGKILL", "SIGTERM", "SIGSEGV", "exits"],
)
def test_a_rank_that_fails_ends_every_rank_and_is_named(
    file: Path, run: Path, tmp_path: Path, fault: Callable[[], object], words: list[str]
) -> None:
    shoal = Apart(["train", file, *sets(checkpoint__every=2)], tmp_path / "said", at_step_3(fault))
    with ended([shoal.pid, *(ranks := shoal.ranks())]):
        under_way(run, 2)
        result = shoal.end(10)
        assert result.code == 1
        assert not any(map(alive, ranks))
    for word in words:
        assert word in result.err
    assert result.err.count("error:") == 1
    assert f"The same command goes on from {run / 'step-00000002'}." in result.err
    assert [values["step"] for values in events(run, "step")] == [1, 2, 3]
    assert loads(run) == 2


def poison_a_gradient() -> None:
    """Of one norm on rank 1, in the fourth step."""
    step = Engine.step

    def poisoned(self: Engine, batch: Batch) -> StepResult:
        due = self.world.rank == 1 and self.steps_done == 3
        weight = next(p for p in self.task.module.parameters() if p.ndim == 1)
        hook = weight.register_hook(lambda grad: grad * float("nan") if due else grad)
        try:
            return step(self, batch)
        finally:
            hook.remove()

    Engine.step = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("line", ["dp=2,zero=3", "tp=2:1d-sp"])
def test_a_poisoned_gradient_on_one_rank_is_skipped_by_all_and_logged_with_its_samples(
    file: Path, run: Path, tmp_path: Path, line: str
) -> None:
    options = ["--layout", line, *sets(run__steps=6, data__validation=0)]
    shoal = Apart(["train", file, *options], tmp_path / "said", poison_a_gradient)
    result = shoal.end(60)
    assert result.code == 0
    assert "step 4 updated nothing: a gradient was not finite on some rank (1 steps so far)" in result.out
    (skipped,) = events(run, "skipped")
    assert (skipped["step"], skipped["so_far"], skipped["samples"]) == (4, 1, list(range(72, 96)))
    assert [values["lr"] > 0 for values in events(run, "step")] == [True] * 3 + [False] + [True] * 2
    assert loads(run) == 6


def test_the_samples_of_the_step_that_ends_a_run_are_logged_too(file: Path, run: Path, tmp_path: Path) -> None:
    options = sets(run__steps=6, data__validation=0, optimizer__skips=0)
    shoal = Apart(["train", file, "--layout", "dp=2", *options], tmp_path / "said", poison_a_gradient)
    result = shoal.end(60)
    assert result.code == 1
    assert "step 4: the gradient norm is nan; nothing was updated" in result.err
    (skipped,) = events(run, "skipped")
    assert (skipped["step"], skipped["samples"]) == (4, list(range(72, 96)))


def in_a_pass(fault: Callable[[], object], backward: bool = False) -> Callable[[], None]:
    """A plant of ``fault`` in a pass of rank 1 through its first feed-forward, or back through its last, in the fourth
    step."""

    def plant() -> None:
        step, forward = Engine.step, FeedForward.forward
        due = False

        def noticing(self: Engine, batch: Batch) -> StepResult:
            nonlocal due
            due = self.world.rank == 1 and self.steps_done == 3
            return step(self, batch)

        def faulty(self: FeedForward, x: Tensor) -> Tensor:
            if due and not backward:
                fault()
            x = forward(self, x)
            if due and backward:
                x.register_hook(lambda _: fault())
            return x

        Engine.step = noticing  # type: ignore[method-assign]
        FeedForward.forward = faulty  # type: ignore[method-assign]

    return plant


IN_PIECES = {"pp=2,mb=2": 1, "tp=2": 0}
"""Layouts in which neither of two ranks can do a step without the other, and the stage of the second."""


@pytest.mark.parametrize(("line", "stage"), IN_PIECES.items())
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_that_raises_names_its_stage_and_what_it_did(
    file: Path, tmp_path: Path, line: str, stage: int, direction: str
) -> None:
    plant = in_a_pass(raise_it, backward=direction == "backward")
    shoal = Apart(["train", file, "--layout", line], tmp_path / "said", plant)
    with ended([shoal.pid, *(ranks := shoal.ranks())]):
        result = shoal.end(30)
        assert not any(map(alive, ranks))
    assert result.code == 1
    assert result.err.startswith("error: rank 1 raised:\nTraceback")
    assert f"ValueError: planted in [rank] 1\nin the {direction} pass of stage {stage}, micro-batch 0\n" in result.err
    assert result.err.count("Traceback") == 1


@pytest.mark.parametrize("line", IN_PIECES)
def test_a_rank_that_is_killed_in_a_pass_ends_the_others(file: Path, run: Path, tmp_path: Path, line: str) -> None:
    plant = in_a_pass(lambda: os.kill(os.getpid(), signal.SIGKILL))
    shoal = Apart(["train", file, "--layout", line, *sets(checkpoint__every=2)], tmp_path / "said", plant)
    with ended([shoal.pid, *(ranks := shoal.ranks())]):
        until(lambda: not alive(ranks[1]), 60)
        result = shoal.end(5)
        assert not any(map(alive, ranks))
    assert result.code == 1
    assert "rank 1 was killed by SIGKILL" in result.err
    assert loads(run) == 2


@pytest.fixture(scope="module", params=[*IN_PIECES, pytest.param("dp=2,zero=3", marks=pytest.mark.parity)])
def silent(request: pytest.FixtureRequest, store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Ended]:
    """A layout, and the end of a run under it whose second rank stopped, with a patience of two seconds."""
    folder = tmp_path_factory.mktemp("silent")
    plant = in_a_pass(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    arguments = ["train", write_run(folder, store), "--layout", request.param, *sets(run__timeout=2)]
    shoal = Apart(arguments, folder / "said", plant)
    with ended([shoal.pid, *(ranks := shoal.ranks())]):
        until(lambda: stopped(ranks[1]), 60)
        result = shoal.end(2 + 5)
        assert not any(map(alive, ranks))
    return request.param, result


def test_a_rank_that_stops_ends_the_run_when_the_patience_of_the_other_ends(silent: tuple[str, Ended]) -> None:
    line, result = silent
    assert result.code == 1
    assert result.err.startswith("error: rank 0 raised:\nTraceback")
    assert "Timed out: nothing from rank 1 for 2 s" in result.err
    waiting = "backward" if line.startswith("pp") else "forward"
    assert f"in the {waiting} pass of stage 0, micro-batch 0\n" in result.err


def test_a_rank_that_stops_is_named(silent: tuple[str, Ended]) -> None:
    _, result = silent
    assert "nothing from rank 1 while " in result.err


def test_the_traceback_of_the_first_failure_is_the_only_one(file: Path, tmp_path: Path) -> None:
    shoal = Apart(["train", file], tmp_path / "said", at_step_3(raise_it))
    result = shoal.end(40)
    assert result.err.count("Traceback") == 1
    assert "rank 0" not in result.err
    assert "The same command starts again, for nothing was saved yet." in result.err


def test_a_rank_that_is_killed_ends_the_installed_command(file: Path, run: Path) -> None:
    command = [sys.executable, "-c", COMMAND, "train", str(file), "-n", "2", *ENDLESS]
    shoal = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        under_way(run)
        ranks = Path(f"/proc/{shoal.pid}/task/{shoal.pid}/children").read_text(encoding="ascii").split()
        pids = sorted(map(int, ranks))
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        _, err = shoal.communicate(timeout=10)
    finally:
        shoal.kill()
    assert shoal.returncode == 1
    assert "error: rank 1 was killed by SIGKILL" in err
    assert not any(map(alive, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_one_message(file: Path, run: Path, tmp_path: Path, number: signal.Signals) -> None:
    """An interrupt goes to the whole group of processes, as a terminal sends it."""
    shoal = Apart(["train", file, *ENDLESS], tmp_path / "said")
    with ended([shoal.pid, *(ranks := shoal.ranks())]):
        under_way(run)
        if number == signal.SIGINT:
            os.killpg(shoal.pid, number)
        else:
            os.kill(shoal.pid, number)
        result = shoal.end(10)
        assert not any(map(alive, ranks))
    assert result.code == 128 + number
    lines = result.err.splitlines()
    assert lines[0] == f"error: stopped by {number.name}"
    assert lines[1].startswith(f"The same command goes on from {run}/step-")
    assert len(lines) == 2
    assert loads(run) >= 3


def test_an_interrupt_that_was_to_be_ignored_is(file: Path, run: Path, tmp_path: Path) -> None:
    """A shell's background job is started so."""
    shoal = Apart(["train", file, *ENDLESS], tmp_path / "said", lambda: ignore(signal.SIGINT))
    with ended([shoal.pid, *shoal.ranks()]):
        under_way(run)
        os.killpg(shoal.pid, signal.SIGINT)
        under_way(run, saved_step(run) + 3)
        os.kill(shoal.pid, signal.SIGTERM)
        assert shoal.end(10).code == 128 + signal.SIGTERM


def ignore(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)


def test_no_rank_outlives_a_supervisor_that_is_killed(file: Path, run: Path, tmp_path: Path) -> None:
    shoal = Apart(["train", file, *ENDLESS], tmp_path / "said")
    with ended([shoal.pid, *(ranks := shoal.ranks())]):
        under_way(run)
        os.kill(shoal.pid, signal.SIGKILL)
        assert shoal.end(5).code == -signal.SIGKILL
        until(lambda: not any(map(alive, ranks)), 5)
    assert loads(run) >= 3


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_run_whose_reader_leaves_ends_with_one_message(file: Path, tmp_path: Path, flags: list[str]) -> None:
    here, there = os.pipe()
    shoal = Apart(["train", file, *ENDLESS, *flags], tmp_path / "said", lambda: close_and_write_to(here, there))
    os.close(there)
    with os.fdopen(here, encoding="utf-8") as reader, ended([shoal.pid, *(ranks := shoal.ranks())]):
        assert reader.readline()
        reader.close()
        result = shoal.end(10)
        assert not any(map(alive, ranks))
    assert result.code == 1
    assert result.err.startswith("error: standard output was closed, so nobody could see how the run goes on\nThe same")
    assert len(result.err.splitlines()) == 2


def close_and_write_to(here: int, there: int) -> None:
    """Let standard output be the pipe ``there``, whose other end is another process's."""
    os.close(here)
    os.dup2(there, 1)
    os.close(there)


def test_two_runs_do_not_share_a_folder(file: Path, run: Path, tmp_path: Path) -> None:
    first = Apart(["train", file, *ENDLESS], tmp_path / "first")
    with ended([first.pid, *first.ranks()]):
        under_way(run)
        for extra in ([], ["--fresh"]):
            second = Apart(["train", file, *ENDLESS, *extra], tmp_path / "second").end(20)
            assert second.code == 2
            expected = f"run.name = run: process {first.pid} on "
            assert expected in second.err
            assert f"is training in {run}; wait for it, end it, or use another name" in second.err
        assert alive(first.pid)
        under_way(run, saved_step(run) + 2)
        os.kill(first.pid, signal.SIGTERM)
        first.end(10)
    config = configuration.load(file)
    with occupy(config), pytest.raises(ConfigError), occupy(config):
        pass


def stopped(pid: int) -> bool:
    """Whether a signal has stopped the process."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"


def kill_at_a_random_moment(file: Path, run: Path, said: Path, draw: random.Random, saved: int) -> Ended:
    """A run that saves every step, and is killed some time after the first save that is new, all its processes."""
    shoal = Apart(["train", file, *ENDLESS], said)
    with ended([shoal.pid, *(ranks := shoal.ranks())]):
        under_way(run, saved + 1)
        time.sleep(draw.uniform(0, 0.15))
        for pid in draw.sample([shoal.pid, *ranks], 3):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        return shoal.end(5)


@pytest.mark.parametrize("moments", [4, pytest.param(20, marks=[pytest.mark.parity, pytest.mark.slow])])
def test_killed_at_random_moments_of_saves_a_run_goes_on(
    file: Path, run: Path, tmp_path: Path, store: Path, moments: int, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    draw, saved = random.Random(moments), 0
    for _ in range(moments):
        assert kill_at_a_random_moment(file, run, tmp_path / "said", draw, saved).code != 0
        step = loads(run)
        assert step > saved
        assert [values["step"] for values in events(run, "start")][-1] == saved
        saved = step
    # One step more, in which nothing is killed, clears what the dead ones left.
    result = Shoal(capfd, monkeypatch)("train", file, *ENDLESS, *sets(run__stop=saved + 1))
    assert (result.code, result.err) == (0, "")
    assert loads(run) == saved + 1
    assert len([path for path in run.iterdir() if path.name.startswith(("step-", "latest"))]) == 3
