"""Runs of asynchronous pipelines: what is told of their steps, and what evaluation, saving and resuming do to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from whole_runs import events, make_store, sets, write_run

from shoal import config as configuration
from shoal.layout import Layout
from shoal.train.loop import train
from shoal.train.metrics import Sink
from shoal.train.pool import Pool
from shoal.train.setup import fit, make_model, materialise_alone, open_data
from shoal.train.verify import _trainer

Go = Callable[..., Path]
LINES = ("pp=2:2bw,mb=3", "pp=3:pipedream,mb=2", "dp=2,pp=2:2bw,zero=1,mb=2")
EVALUATED, SAVED, STEPS = 7, 5, 13
SETTINGS = {"run__steps": STEPS, "evaluation__every": EVALUATED, "checkpoint__every": SAVED}
DRAINED = {5, 7, 10, 13}
"""The steps that end with a drain."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


def nothing() -> Sequence[Sink]:
    return ()


@pytest.fixture(scope="module")
def go(pool: Pool, store: Path) -> Go:
    """Train in ``folder``, from what is there, under a layout; returns the run's folder."""

    def run(folder: Path, line: str, **settings: object) -> Path:
        config = configuration.load(write_run(folder, store), sets(**settings)[1::2])
        layout = Layout.parse(f"{line},dtype=float64")
        pool.run(train, config, fit(config, layout, layout.ranks), nothing, ranks=layout.ranks)
        return folder / "out" / "run"

    return run


def recurrence(folder: Path, store: Path, line: str) -> list[tuple[float, float]]:
    """Loss and norm of every step in one process, drained where the run is."""
    config = configuration.load(write_run(folder, store), sets(**SETTINGS)[1::2])
    layout = Layout.parse(f"{line},dtype=float64")
    layout = fit(config, layout, layout.ranks)
    model = make_model(config, layout)
    materialise_alone(model, config.run.seed)
    trainer, source, found = _trainer(config, layout, model), open_data(config), []
    for step in range(STEPS):
        result = trainer.step(source.batch(step))
        found.append((result.loss, result.grad_norm))
        if step + 1 in DRAINED:
            trainer.drain()
    return found


def told(run: Path) -> list[tuple[str, int]]:
    """Everything that a run told, in order."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [(values["event"], values.get("step", 0)) for values in map(json.loads, lines)]


@pytest.mark.parity
@pytest.mark.parametrize("line", LINES)
def test_every_step_is_told_once_before_what_drains_it(line: str, go: Go, store: Path, tmp_path: Path) -> None:
    """With the loss, norm, rate and samples that are its own; in the middle of a run an evaluation and a checkpoint are
    of all steps that were begun."""
    truth = recurrence(tmp_path, store, line)
    run = go(tmp_path, line, **SETTINGS)
    expected: list[tuple[str, int]] = [("start", 0)]
    for step in range(1, STEPS + 1):
        expected.append(("step", step))
        if step in (EVALUATED, STEPS):
            expected.append(("evaluation", step))
        if step in (SAVED, 2 * SAVED, STEPS):
            expected.append(("checkpoint", step))
    assert told(run) == [*expected, ("end", STEPS)]
    steps = events(run, "step")
    assert [values["loss"] for values in steps] == pytest.approx([loss for loss, _ in truth], rel=1e-10)
    assert [values["grad_norm"] for values in steps] == pytest.approx([norm for _, norm in truth], rel=1e-10)
    other = tmp_path / "plain"
    other.mkdir()
    plain = events(go(other, "dp=1", **SETTINGS), "step")
    for key in ("hash", "lr", "tokens"):
        assert [values[key] for values in steps] == [values[key] for values in plain], key


@pytest.mark.parity
@pytest.mark.parametrize("line", LINES)
def test_a_resumed_run_is_the_unbroken_one(line: str, go: Go, tmp_path: Path) -> None:
    """A checkpoint ends what is under way, so the unbroken run was as far there."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    truth = go(whole, line, **SETTINGS)
    go(parts, line, **SETTINGS, run__stop=2 * SAVED)
    run = go(parts, line, **SETTINGS)
    wanted, found = events(truth, "step"), events(run, "step")
    assert [values["step"] for values in found] == list(range(1, STEPS + 1))
    assert [values["hash"] for values in found] == [values["hash"] for values in wanted]
    for key in ("loss", "grad_norm", "lr"):
        assert [values[key] for values in found] == pytest.approx([values[key] for values in wanted], rel=1e-9), key
    last: list[Any] = [events(one, "evaluation")[-1]["loss"] for one in (truth, run)]
    assert last[1] == pytest.approx(last[0], rel=1e-9)
