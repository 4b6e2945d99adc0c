"""Runs of asynchronous pipelines: what is told of their steps, and what evaluation, saving and resuming do to them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from whole_runs import events, make_store, sets, write_run

from shoal import config as configuration
from shoal.comm.world import World
from shoal.config import Config
from shoal.errors import Diverged
from shoal.layout import Layout
from shoal.model.decoder import FeedForward
from shoal.train.loop import train
from shoal.train.metrics import Sink
from shoal.train.pool import Pool
from shoal.train.setup import fit, make_model, materialise_alone, open_data
from shoal.train.verify import _trainer

Go = Callable[..., Path]
LINES = (
    "pp=2:2bw,mb=3",
    "pp=3:pipedream,mb=2",
    "pp=3:pipedream-vertical,mb=2",
    "dp=2,pp=2:2bw,zero=1,mb=2",
    "dp=3,sync=server{stale=2}",
)
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


def poisoned(world: World, config: Config, layout: Layout, at: int) -> None:
    """Train; the gradients of micro-batch ``at``, counted over the run, are not finite. Each rank has one block."""
    forward, calls = FeedForward.forward, 0

    def poisoning(self: FeedForward, x: Tensor) -> Tensor:
        nonlocal calls
        y = forward(self, x)
        if calls == at:
            y.register_hook(lambda gradient: gradient * math.nan)
        calls += 1
        return y

    FeedForward.forward = poisoning  # type: ignore[method-assign]
    try:
        train(world, config, layout, nothing)
    finally:
        FeedForward.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("line", "samples"),
    [
        pytest.param("pp=2:2bw,mb=2", [(72, 96)], marks=pytest.mark.parity),
        ("dp=2,pp=2:pipedream,mb=2", [(78, 84), (90, 96)]),
        pytest.param("pp=2:pipedream,mb=3", [(80, 88)], marks=pytest.mark.parity),
    ],
)
@pytest.mark.parametrize("skips", [0, pytest.param(1, marks=pytest.mark.parity)])
def test_the_samples_are_named_whose_gradients_were_not_finite(
    line: str, samples: list[tuple[int, int]], skips: int, pool: Pool, store: Path, tmp_path: Path
) -> None:
    """Those of the step, though later ones have begun, and of the micro-batch, if that is an update of its own; what
    was before is told before, if this ends the run."""
    layout = Layout.parse(f"{line},dtype=float64")
    settings = {"model__layers": 2, "run__steps": 8, "optimizer__skips": skips, "data__validation": 0}
    config = configuration.load(write_run(tmp_path, store), sets(**settings)[1::2])
    at = 3 * layout.mb + 1
    with pytest.raises(Diverged, match=r"^step 4: ") if skips == 0 else nullcontext():
        pool.run(poisoned, config, fit(config, layout, layout.ranks), at, ranks=layout.ranks)
    run = tmp_path / "out" / "run"
    (skipped,) = events(run, "skipped")
    assert (skipped["step"], skipped["so_far"]) == (4, 1)
    assert skipped["samples"] == [one for part in samples for one in range(*part)]
    last = 3 if skips == 0 else 8
    assert [values["step"] for values in events(run, "step")] == list(range(1, last + 1))
