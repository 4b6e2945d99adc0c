"""A run that stops and goes on under another layout is the run that never stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from whole_runs import Shoal, events, flip, make_store, refused, sets, write_run

from shoal import config as configuration
from shoal.data.batches import Batches
from shoal.layout import Layout
from shoal.train.loop import train
from shoal.train.metrics import Sink
from shoal.train.pool import Pool
from shoal.train.setup import fit, open_data

LAYOUTS = (
    "dp=1",
    "dp=4",
    "dp=2,mb=2",
    "tp=2,pp=2",
    pytest.param("dp=2,tp=2:1d-sp,zero=1", marks=pytest.mark.parity),
    "dp=2,pp=2:gpipe,zero=3,mb=3,recompute=full",
)
EPOCH = 12
"""Whole batches of an epoch of the short run: the next is of two epochs."""

Go = Callable[..., Path]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    return Shoal(capfd, monkeypatch)


def nothing() -> Sequence[Sink]:
    return ()


@pytest.fixture(scope="module")
def go(pool: Pool, store: Path) -> Go:
    """Train in ``folder``, from what is there, under a layout; returns the run's folder."""

    def run(folder: Path, line: str, **settings: object) -> Path:
        file = write_run(folder, store)
        config = configuration.load(file, sets(**settings)[1::2])
        layout = Layout.parse(f"{line},dtype=float64")
        pool.run(train, config, fit(config, layout, layout.ranks), nothing, ranks=layout.ranks)
        return folder / "out" / "run"

    return run


@pytest.fixture(scope="module")
def unbroken(go: Go, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go(tmp_path_factory.mktemp("unbroken"), "dp=2")


@pytest.fixture(scope="module")
def half(go: Go, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which ten of twenty steps have been trained."""
    folder = tmp_path_factory.mktemp("half")
    go(folder, "dp=2", run__stop=10, checkpoint__every=5)
    return folder


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder / "out", to / "out")
    return to


def same_course(run: Path, truth: Path, first: int) -> None:
    """The run's steps from ``first`` on have the losses, norms and batches of the true one's."""
    ours = {values["step"]: values for values in events(run, "step")}
    for wanted in events(truth, "step")[first - 1 :]:
        found = ours.pop(wanted["step"])
        assert found["hash"] == wanted["hash"]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-9)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-9)
        assert (found["lr"], found["tokens"]) == (wanted["lr"], wanted["tokens"])
    assert set(ours) <= set(range(1, first))


@pytest.mark.parametrize("line", LAYOUTS)
def test_a_resumed_run_is_the_unbroken_one(go: Go, unbroken: Path, half: Path, line: str, tmp_path: Path) -> None:
    run = go(copied(half, tmp_path), line)
    assert [values["step"] for values in events(run, "step")] == list(range(1, 21))
    same_course(run, unbroken, 11)
    before, after = (events(folder, "evaluation")[-1] for folder in (unbroken, run))
    assert after["step"] == 20
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-9)


def test_the_hashes_tell_batches_apart(unbroken: Path) -> None:
    assert len({values["hash"] for values in events(unbroken, "step")}) == 20


def test_a_run_resumed_at_the_end_of_an_epoch_is_the_unbroken_one(go: Go, store: Path, tmp_path: Path) -> None:
    source = open_data(configuration.load(write_run(tmp_path, store), ["data.validation=0.951"]))
    assert isinstance(source, Batches)
    assert 24 * EPOCH < source.n_samples < 24 * (EPOCH + 1)
    settings = {"data__validation": 0.951, "run__steps": 16}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    truth = go(whole, "dp=2", **settings)
    go(parts, "dp=2", run__stop=EPOCH, **settings)
    go(parts, "dp=4", run__stop=EPOCH + 1, **settings)
    same_course(go(parts, "dp=1", **settings), truth, 1)


def test_the_validation_loss_is_the_same_under_every_layout(go: Go, store: Path, tmp_path: Path) -> None:
    """Over the whole split, whose last batch is not full."""
    settings = {"run__steps": 2, "evaluation__batches": 1000}
    losses = []
    for number, line in enumerate(("dp=1", "dp=1,mb=2", "dp=1,mb=4", "dp=2", "tp=2:1d-sp", "pp=3,mb=2", "dp=2,zero=3")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (evaluation,) = events(go(folder, line, **settings), "evaluation")
        validation: Any = open_data(configuration.load(folder / "run.toml"), "validation")
        assert evaluation["batches"] == validation.n_batches
        assert validation.n_samples % 24
        losses.append(evaluation["loss"])
    assert losses == pytest.approx([losses[0]] * 7, rel=1e-12)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """What is saved: contents, and the time of the last change."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("metrics.jsonl", ".lock")]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def checkpoints(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {name: state for name, state in snapshot(folder).items() if name.startswith(("step-", "latest"))}


def test_a_finished_run_ends_at_once_and_changes_nothing(unbroken: Path, shoal: Shoal) -> None:
    saved = checkpoints(unbroken)
    loss = events(unbroken, "evaluation")[-1]["loss"]
    result = shoal("train", unbroken / "run.toml", "--layout", "dp=2")
    assert (result.code, result.err) == (0, "")
    assert "complete: step 20 is saved" in result.out
    assert f"final validation loss {loss:.4f}" in result.out
    assert checkpoints(unbroken) == saved
    assert len(events(unbroken, "step")) == 20
    assert events(unbroken, "evaluation")[-1]["loss"] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "name", "value", "legal"),
    [
        ("run.seed=7", "run.seed", "7", "set it to 0"),
        ("data.batch=12", "data.batch", "12", "set it to 24"),
        ("data.seq_len=16", "data.seq_len", "16", "set it to 32"),
        ("data.validation=0.1", "data.validation", "0.1", "set it to 0.02"),
        ("model.hidden=60", "model.hidden", "60", "set it to 48"),
        ("model.tied=true", "model.tied", "True", "set it to False"),
        ("optimizer.name=sgd", "optimizer.name", "sgd", "set it to adamw"),
        ("run.steps=9", "run.steps", "9", "use at least 10"),
        ("run.stop=9", "run.stop", "9", "use at least 10"),
    ],
)
def test_another_run_does_not_go_on_from_it(
    half: Path, store: Path, shoal: Shoal, change: str, name: str, value: str, legal: str
) -> None:
    saved = snapshot(half)
    result = shoal("train", write_run(half, store), "--set", change)
    assert result.code == 2
    for words in (f"{name} = {value}: the checkpoint", "step-00000010", legal, "--fresh"):
        assert words in result.err
    assert result.out == ""
    assert snapshot(half).keys() == saved.keys()


def test_a_run_does_not_go_on_with_other_tokens(half: Path, shoal: Shoal, tmp_path: Path) -> None:
    other = make_store(tmp_path, 100_000)
    result = shoal("train", write_run(half, other))
    assert result.code == 2
    assert f"data.path = {other}: the checkpoint" in result.err
    assert "trained on other tokens" in result.err


def test_dropout_z_loss_and_learning_rate_may_change(go: Go, half: Path, tmp_path: Path) -> None:
    run = go(copied(half, tmp_path), "dp=1", model__dropout=0.0, model__z_loss=1e-4, optimizer__lr=1e-4, run__steps=12)
    assert events(run, "step")[-1]["step"] == 12


def test_a_checkpoint_that_is_cut_short_is_refused_before_any_process_starts(
    shoal: Shoal, store: Path, half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "_start", lambda pool: pytest.fail("a process was to be started"))
    file = write_run(copied(half, tmp_path), store)
    newest = tmp_path / "out" / "run" / "step-00000010"
    shard = newest / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    result = shoal("train", file)
    refused(result, f"checkpoint = {newest}: damaged: {shard.name} has", f"move {newest} away", "--fresh")
    (newest / "manifest.json").write_text("{", encoding="utf-8")
    refused(shoal("train", file), f"checkpoint = {newest}: damaged: manifest.json is not JSON")


def test_a_checkpoint_with_a_flipped_bit_is_refused_and_the_one_before_goes_on(
    shoal: Shoal, store: Path, half: Path, tmp_path: Path
) -> None:
    file = write_run(copied(half, tmp_path), store)
    run = tmp_path / "out" / "run"
    newest = run / "step-00000010"
    flip(newest / "rank-00001.safetensors")
    lines = len(events(run, "start"))
    refused(shoal("train", file), f"{newest / 'rank-00001.safetensors'}: damaged", f"move {newest} away", "--fresh")
    assert len(events(run, "start")) == lines
    shutil.move(newest, tmp_path / "away")
    assert shoal("train", file, *sets(run__stop=6)).code == 0
    assert events(run, "start")[-1]["step"] == 5
