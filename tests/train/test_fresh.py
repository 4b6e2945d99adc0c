"""A run that starts anew moves what an earlier one left aside: all of it, and not before all is sure to be accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import Shoal, events, make_store, refused, sets, write_run

from shoal.engine import Engine
from shoal.errors import ConfigError
from shoal.train import loop
from shoal.train.setup import make_engine

BUDGET = sets(memory__budget_gib=0.001)
MUON = [*sets(optimizer__name="muon"), "--layout", "dp=2,offload=optimizer:nvme"]


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    return Shoal(capfd, monkeypatch)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh")
    return write_run(folder, make_store(folder))


@pytest.fixture
def run(file: Path, shoal: Shoal) -> Path:
    """The folder of a run that has saved something."""
    folder = file.parent / "out" / "run"
    if not folder.exists():
        assert shoal("train", file, "--layout", "dp=1", *sets(run__stop=1)).code == 0
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a run but the one that keeps others out, and its contents."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refuse_on_the_last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk may that is full by then, of another machine perhaps."""

    def refusing(*arguments: object) -> Engine:
        engine = make_engine(*arguments)  # type: ignore[arg-type]
        if engine.world.rank == 1:
            raise ConfigError("planted")
        return engine

    monkeypatch.setattr(loop, "make_engine", refusing)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (BUDGET, "memory.budget_gib = 0.001"),
        (MUON, "layout.offload = optimizer:nvme: Muon"),
        ([*sets(memory__swap="/no/where"), "--layout", "offload=params:nvme"], "/no/where: no file can be made here"),
        (sets(optimizer__rounding="stochastic"), "optimizer.rounding = stochastic"),
        (sets(checkpoint__start="{run}"), "checkpoint.start = {run}: is in {run}, which --fresh would move aside"),
        (sets(data__path="{run}/../run/my.store"), "my.store: is in {run}, which --fresh would move aside"),
        (sets(memory__swap="{run}"), "memory.swap = {run}: is in {run}"),
        ([], "planted"),
    ],
)
def test_a_run_that_is_refused_leaves_the_earlier_one_alone(
    file: Path, run: Path, shoal: Shoal, monkeypatch: pytest.MonkeyPatch, arguments: list[str], word: str
) -> None:
    saved = snapshot(run)
    assert "latest" in saved
    if not arguments:
        refuse_on_the_last_rank(monkeypatch)
    refused(shoal("train", file, "--fresh", *(one.format(run=run) for one in arguments)), word.format(run=run))
    assert snapshot(run) == saved
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_fresh_moves_the_old_run_aside_and_loses_nothing(file: Path, run: Path, shoal: Shoal) -> None:
    saved, aside = snapshot(run), run.with_name("run.old-1")
    result = shoal("train", file, "--fresh", *sets(run__steps=1, run__seed=5))
    assert (result.code, result.err) == (0, "")
    assert f"the earlier run is now {aside}" in result.out
    assert snapshot(aside) == saved
    assert [values["step"] for values in events(run, "step")] == [1]
    assert events(run, "start")[0]["aside"] == str(aside)


def test_nothing_is_moved_where_nothing_was(file: Path, tmp_path: Path, shoal: Shoal) -> None:
    result = shoal("train", file, "--fresh", "--layout", "dp=1", *sets(run__steps=1, run__folder=tmp_path / "out"))
    assert (result.code, result.err) == (0, "")
    assert "the earlier run" not in result.out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run"]
