"""What verify holds an asynchronous layout to, and that it finds what makes one wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from shoal import flow as flow_module
from shoal.config import Config, load
from shoal.data_parallel.flat import Flat
from shoal.data_parallel.norm import Norm
from shoal.engine import Engine
from shoal.errors import LayoutError, RankFailed
from shoal.layout import Layout
from shoal.pipeline.weights import Weights
from shoal.report.parity import parity_table
from shoal.train import verify as verify_module
from shoal.train.pool import Pool
from shoal.train.reference import PlainTrainer
from shoal.train.setup import learning_rate
from shoal.train.verify import Report, verify

RUN = Path(__file__).parents[2] / "runs" / "tiny6.toml"


def read(*more: str) -> Config:
    return load(RUN, ["model.layers=3", "data.seq_len=6", "data.batch=12", "optimizer.clip=0.1", *more])


def exact(line: str) -> Layout:
    return Layout.parse(f"{line},dtype=float64")


def shown(report: Report) -> str:
    console = Console(width=160, record=True)
    with console.capture() as capture:
        console.print(parity_table(report))
    return capture.get()


@pytest.mark.parametrize("schedule", ["2bw", "pipedream", "pipedream-vertical"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_an_asynchronous_layout_is_held_to_its_recurrence(schedule: str, steps: int, pool: Pool) -> None:
    """However few steps there are."""
    report = verify(read(), exact(f"pp=2:{schedule},mb=3"), pool, steps)
    assert report.agree, report.faults
    assert list(report.max_rel) == ["loss", "grad_norm", "weight"]
    assert all(name.startswith("weight ") for name in report.worst)
    truth = f"one process with gradients as old as those of {schedule}"
    assert report.as_json()["compared_with"] == report.truth == truth
    told = shown(report)
    assert f"computes what {truth} computes." in told
    assert "weights" in told
    assert "gradients  " not in told


def test_a_synchronous_layout_is_held_to_one_process(pool: Pool) -> None:
    report = verify(read(), exact("pp=2:zb-h1,mb=2"), pool, 1)
    assert list(report.max_rel) == ["loss", "grad_norm", "grad", "weight"]
    assert report.as_json()["compared_with"] == "one process"
    assert "computes what one process computes." in shown(report)


@pytest.mark.parametrize("options", ["gather=int8", "reduce=int8", "gather=int8;reduce=int8;keep=step"])
def test_a_layout_that_rounds_is_refused_and_told_which_one_to_verify(options: str, pool: Pool) -> None:
    kept = r"\{keep=step\}" * ("keep" in options)
    with pytest.raises(LayoutError, match=rf"int8 blocks round away .*; verify the same without, zero=3{kept}: "):
        verify(read(), exact(f"dp=2,zero=3{{{options}}}"), pool, 1)


@pytest.mark.parametrize(
    ("line", "compared"), [("pp=2:2bw,mb=3", [{0}, {1}, {2}, {2, 3}, {2, 6}]), ("pp=2,mb=3", [{0}, {0, 1}])]
)
def test_tensors_are_compared_after_drains(line: str, compared: list[set[int]]) -> None:
    lengths = (1, 2, 3, 4, 7) if len(compared) > 2 else (1, 2)
    assert [verify_module._compared(exact(line), steps) for steps in lengths] == compared


ROUNDED, OFF = (1e-7, 1e-4), ((3e-5, 0.0), (0.0, 3e-4), (0.0, 5e-4), (1e-5, 3.9e-4))
"""By step: what one process rounds, and by how much layouts are off."""


@pytest.mark.parametrize(("off", "agrees"), [*zip(OFF, (False, True, False, True), strict=True)])
def test_float32_is_allowed_what_one_process_rounds_a_few_times_over(
    off: tuple[float, float], agrees: bool, tmp_path: Path
) -> None:
    """Of the same step: where nothing is amplified yet, no more than ever."""
    exact = torch.ones(4, dtype=torch.float64)
    for step, scales in enumerate(zip((0.0, 0.0), ROUNDED, off, strict=True)):
        for name, scale in zip(("truth", "rounded", "rank0"), scales, strict=True):
            kept = {f"{kind} w@0:4": exact * (1 + scale) for kind in ("gradient", "weight")}
            save_file(kept, tmp_path / f"{name}-{step}")
    scalars = [verify_module._Scalars(1.0, 1.0)] * 2
    report = verify_module._compare(Layout.parse("dp=1"), 2, tmp_path, scalars, [scalars])
    assert report.agree == agrees, report.faults
    worst = max((0, 1), key=lambda step: off[step] / max(2e-5, 4 * ROUNDED[step]))
    assert report.max_rel["grad"] == pytest.approx(off[worst])
    assert report.allowed["grad"] == report.allowed["weight"] == pytest.approx((2e-5, 4e-4)[worst])
    assert (report.allowed["loss"], report.rounding) == (2e-5, pytest.approx(1e-4))
    assert re.search(r"one process in float32 itself +1\.0e-04", shown(report))


def test_float32_agrees_with_one_process_in_float64(pool: Pool) -> None:
    report = verify(read(), Layout.parse("dp=2,mb=2"), pool, 3)
    assert report.agree, report.faults
    assert 1e-8 < report.rounding < 1e-3
    assert "computes what one process in float64 computes, up to what float32 rounds." in shown(report)


Patch = Callable[[pytest.MonkeyPatch], None]


def no_delay(patch: pytest.MonkeyPatch) -> None:
    """The truth is that of a schedule with a flush."""

    def plain(config: Config, layout: Layout, model: Any) -> PlainTrainer:
        return PlainTrainer(model, config.optimizer, learning_rate(config), config.run.seed)

    patch.setattr(verify_module, "_trainer", plain)


def rate_of_another_step(patch: pytest.MonkeyPatch) -> None:
    """The learning rate is that of the newest step, not of the one whose gradients are applied."""
    init = flow_module.Flow.__init__

    def shifted(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        rate = self._rate
        self._rate = lambda step: rate(step + 1)

    patch.setattr(flow_module.Flow, "__init__", shifted)


def newest_weights_in_backward(patch: pytest.MonkeyPatch) -> None:
    """No version is kept: updates are written where passes under way look."""

    def advance(self: Weights) -> None:
        self.use(self.newest)

    patch.setattr(Weights, "advance", advance)


def no_vertical_sync(patch: pytest.MonkeyPatch) -> None:
    """Every stage uses its newest weights."""
    patch.setattr(Weights, "older", lambda self, age: self.newest)


def vertical_sync(patch: pytest.MonkeyPatch) -> None:
    """The truth has weights of one age on all stages."""
    plain = verify_module.pipedream
    patch.setattr(verify_module, "pipedream", lambda *arguments, vertical: plain(*arguments, vertical=True))


def clipped_by_each_stage(patch: pytest.MonkeyPatch) -> None:
    """2BW knows the norm of all gradients."""
    start = Norm.start

    def own(self: Norm) -> Any:
        everyone = self._group
        self._group = replace(everyone, ranks=(everyone.rank,))
        return start(self)

    patch.setattr(Norm, "start", own)


def clipped_by_all(patch: pytest.MonkeyPatch) -> None:
    """PipeDream clips each stage by itself: here with a norm that is twice as large."""
    norm = Norm.find
    patch.setattr(Norm, "find", lambda self, group=None: 2 * norm(self, group))


def one_buffer(patch: pytest.MonkeyPatch) -> None:
    """The gradients of two batches meet in one buffer."""
    patch.setattr(Flat, "swap", lambda self: None)


def never_drained(patch: pytest.MonkeyPatch) -> None:
    """What is under way when weights are read is lost."""
    drain = Engine.drain

    def late(self: Engine) -> None:
        weights = [one.tensor.clone() for one in self.fragments() if one.kind == "weight"]
        drain(self)
        for before, one in zip(weights, (one for one in self.fragments() if one.kind == "weight"), strict=True):
            one.tensor.detach().copy_(before)

    patch.setattr(Engine, "drain", late)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("pp=2:2bw,mb=3", no_delay),
        ("pp=2:pipedream,mb=3", no_delay),
        ("pp=2:2bw,mb=3", rate_of_another_step),
        ("pp=2:pipedream,mb=3", rate_of_another_step),
        ("pp=2:2bw,mb=3", newest_weights_in_backward),
        ("pp=2:pipedream,mb=3", newest_weights_in_backward),
        ("pp=2:pipedream-vertical,mb=3", no_vertical_sync),
        ("pp=2:pipedream,mb=3", vertical_sync),
        ("pp=2:2bw,mb=3", clipped_by_each_stage),
        ("pp=2:pipedream,mb=3", clipped_by_all),
        ("dp=2,pp=2:2bw,mb=3", one_buffer),
        ("pp=2:2bw,mb=3", never_drained),
        ("pp=2:pipedream,mb=3", never_drained),
    ],
)
def test_a_fault_of_an_asynchronous_pipeline_is_found(line: str, fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """By verify, unless autograd finds it first: a weight that a pass needs was written to."""
    fault(monkeypatch)
    told = disagreement(line)
    if fault is newest_weights_in_backward and "disagrees" not in told:
        assert "modified by an inplace operation" in told
    else:
        assert "disagrees with one process with gradients as old as" in told


def disagreement(line: str) -> str:
    """What verify shows, or what ended it, in processes that are forked now."""
    layout = exact(line)
    with Pool(layout.ranks) as workers:
        try:
            return shown(verify(read(), layout, workers))
        except RankFailed as error:
            return str(error)
