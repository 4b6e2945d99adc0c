"""A schedule with costs by layer that were measured, here made up."""

from __future__ import annotations

import shlex
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from shoal.build import DTYPES, list_costs, passes_of, shares_of
from shoal.config import Optimizer, load
from shoal.layout import Layout
from shoal.pipeline.layer_costs import LayerCosts
from shoal.pipeline.simulate import simulate
from shoal.pipeline.stream import STREAMS
from shoal.report.measured import Asked, Measured, measured_report, states_of, to_do_with, with_measured
from shoal.report.pipeline import pipeline
from shoal.train.setup import make_model

RUN = Path(__file__).parents[2] / "runs" / "tiny.toml"
CONFIG = load(RUN, ["model.layers=6"])
EMBED, BLOCK, HEAD = (0.0, 0.0, 0.0), (0.01, 0.015, 0.005), (0.02, 0.03, 0.01)
"""Seconds."""
COSTS = LayerCosts(
    *zip(EMBED, *[BLOCK] * 6, HEAD, strict=True),
    held=(0, *[1000] * 6, 500),
    kept=(0, *[600] * 6, 0),
    output=(100,) * 8,
)


ADAMW = Optimizer()


def found(line: str, costs: LayerCosts = COSTS, **options: object) -> Measured:
    layout = Layout.parse(line)
    model = make_model(CONFIG, layout)
    return with_measured(layout, model.layers(), model.roles, costs, ADAMW, **options)  # type: ignore[arg-type]


def test_stages_are_balanced_by_what_was_measured() -> None:
    """The head takes as long as two blocks, so its stage has fewer of them."""
    seen = found("pp=2:zb-h1,mb=4")
    assert str(seen.layout) == "pp=2:zb-h1{layers=4/2},mb=4"
    assert seen.stages == (range(5), range(5, 8))
    assert seen.of_stages.forward == pytest.approx((0.04, 0.04))
    assert seen.seen.times == pytest.approx((40, 60, 20, 0))


def test_stages_that_the_layout_names_are_kept() -> None:
    seen = found("pp=2:1f1b{layers=3/3},mb=4")
    assert seen.layout == Layout.parse("pp=2:1f1b{layers=3/3},mb=4")
    assert seen.of_stages.forward == pytest.approx((0.03, 0.05))


def test_stages_may_be_balanced_by_memory() -> None:
    by_time, by_memory = (found("pp=4:1f1b,mb=8", by=by) for by in ("time", "memory"))
    assert max(by_memory.peak_bytes) < max(by_time.peak_bytes)
    assert by_memory.seen.makespan >= by_time.seen.makespan


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pp=2,mb=4", (16, 16)),
        ("pp=2,mb=4,dtype=float64", (32, 32)),
        ("pp=2,mb=4,dtype=bf16", (18, 18)),
        ("pp=2,mb=4,dtype=bf16{grads=bf16}", (16, 16)),
        ("dp=4,pp=2,mb=4,zero=1", (10, 10)),
        ("dp=4,pp=2,mb=4,zero=1/2", (12, 12)),
        ("dp=4,pp=2,mb=4,zero=1,dtype=bf16", (9, 9)),
        ("dp=4,pp=2,mb=4,zero=3", (12, 12)),  # its parts beside what is whole
        ("pp=3:pipedream,mb=4", (28, 24, 20)),
        ("pp=3:pipedream-vertical,mb=4", (28, 28, 28)),
        ("pp=2:pipedream,mb=4,dtype=bf16", (20, 18)),
        ("dp=2,pp=2:2bw,mb=4,zero=1", (22, 18)),
    ],
)
def test_bytes_of_a_parameter_are_those_that_the_docs_have(line: str, expected: tuple[int, ...]) -> None:
    """Of weights and their versions, gradients, masters and moments: docs/precision.md, zero.md and pipeline.md."""
    layout = Layout.parse(line)
    name, size = layout.schedule, DTYPES[layout.dtype].itemsize
    passes = passes_of(layout) if name == "1f1b" else STREAMS[name](layout.pp, layout.mb, 5)
    assert [size * each for each in states_of(layout, ADAMW, passes)] == pytest.approx(expected)


def test_bytes_of_a_parameter_are_those_of_the_optimizer() -> None:
    layout = Layout.parse("pp=2,mb=4")
    for optimizer, states in ((Optimizer(name="sgd"), 2), (Optimizer(name="sgd", momentum=0.9), 3), (ADAMW, 4)):
        assert states_of(layout, optimizer, passes_of(layout)) == (states, states)
    half, rounded = Layout.parse("pp=2,mb=4,dtype=bf16"), Optimizer(rounding="stochastic")
    assert states_of(half, rounded, passes_of(half)) == (7, 7), "14 bytes"


def test_balancing_by_memory_counts_parameters_and_the_versions_that_there_are() -> None:
    """Parameters are all that counts here. The first of four ranks of PipeDream keeps 32 bytes of each, the last 20."""
    nothing = (0,) * 8
    heavy = replace(COSTS, held=nothing, kept=nothing, output=nothing, parameters=(50, *[100] * 6, 50))
    for line, blocks in (("pp=2,mb=4", (3, 3)), ("pp=4:pipedream,mb=4", (1, 1, 2, 2)), ("pp=4,mb=4", (1, 2, 2, 1))):
        assert found(line, heavy, by="memory").layout.stage_layers == blocks


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_of_even_stages_it_is_the_schedule_on_a_clock_of_milliseconds(name: str) -> None:
    alike = LayerCosts(*([0.0, *[time] * 4, 0.0] for time in BLOCK), (0,) * 6, (0,) * 6, (0,) * 6)
    layout = Layout.parse(f"pp=2:{name},mb=4")
    model = make_model(load(RUN, ["model.layers=4"]), layout)
    seen = with_measured(layout, model.layers(), model.roles, alike, ADAMW, transfer=0.001).seen
    times = seen.times
    expected = pipeline(name, 2, 4, times=times)
    assert times == pytest.approx((20, 30, 10, 1))
    assert seen.makespan == pytest.approx(expected.makespan)
    assert (seen.peaks, seen.home) == (expected.peaks, expected.home)


def test_peaks_are_of_whole_programs_in_bytes() -> None:
    """Under GPipe a rank holds all micro-batches, each with its output until the next rank has answered."""
    seen = found("pp=2:gpipe{layers=3/3},mb=4")
    assert seen.seen.peaks == (4, 4)
    first, last = seen.peak_bytes
    assert 4 * 3000 <= first <= 4 * (3000 + 100) + 4 * 100
    assert 4 * 3500 <= last <= 4 * 3500 + 4 * 100


@pytest.mark.parametrize("line", ["pp=4:list,mb=8", "pp=3:list/2{memory=2},mb=5"])
def test_the_line_that_is_told_makes_the_order_that_is_shown(line: str) -> None:
    seen = found(line, transfer=0.00123456)
    told = Layout.parse(str(seen.layout))
    assert told.list_times is not None
    assert told.list_times == pytest.approx(seen.seen.times, rel=5e-3)
    assert told.list_times[3] == 1.23
    assert told.list_memory == Layout.parse(line).list_memory
    model = make_model(CONFIG, told)
    passes = passes_of(told, shares_of(told, model.layers(), model.roles, seen.stages))
    assert seen.seen.makespan == pytest.approx(1e3 * simulate(passes, seen.of_stages).makespan)
    assert seen.seen.peaks == pytest.approx(simulate(passes, list_costs(told)).peaks)


def test_a_stream_is_shown_in_its_steady_state() -> None:
    seen = found("pp=2:pipedream,mb=4")
    assert seen.seen.makespan == pytest.approx(4 * 120)
    assert (seen.seen.weight_versions, seen.seen.bubble_share) == ((2, 1), pytest.approx(0))
    assert seen.peak_bytes[0] >= 2 * seen.of_stages.held[0]


def test_json_has_what_was_measured() -> None:
    said = found("pp=2:zb-h1,mb=4").as_json()
    assert (said["unit"], said["layout"], said["schedule"]) == ("ms", "pp=2:zb-h1{layers=4/2},mb=4", "zb-h1")
    assert len(said["peak_bytes"]) == len(said["stages"]) == 2
    assert said["stages"][1]["layers"] == ["blocks.4", "blocks.5", "head"]
    assert said["stages"][1]["rank"] == 1
    assert said["layers"][-1] == {
        "layer": "head", "forward_ms": 20, "input_gradient_ms": 30, "weight_gradient_ms": 10,
        "held_bytes": 500, "kept_bytes": 0, "output_bytes": 100,
    }  # fmt: skip


def test_a_person_is_told_stages_bubble_bytes_and_what_to_do() -> None:
    seen = found("pp=2:list,mb=4")
    console = Console(width=120, record=True, no_color=True, file=StringIO())
    console.print(measured_report(seen, RUN))
    text = console.export_text()
    for words in ("list: 2 ranks, 4 micro-batches", "milliseconds", "embed, blocks 0–3", "bubble/time", "peak KiB"):
        assert words in text
    commands = [shlex.split(command) for _, command in to_do_with(seen, RUN, str(seen.layout), Asked())]
    assert [command[1] for command in commands] == ["train", "schedule"]
    assert Layout.parse(commands[0][-1]) == seen.layout


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("pp=2:zb-v,mb=4", "list -p 2 -m 4 -v 2"),
        ("pp=2:zb-h1,mb=4", "list -p 2 -m 4"),
        ("pp=2:list,mb=4", "1f1b -p 2 -m 4"),
        ("pp=2:list/2,mb=3", "zb-v -p 2 -m 3"),
        ("pp=2:list/3,mb=3", "breadth-first -p 2 -m 3 -v 3"),
    ],
)
def test_another_schedule_has_as_many_stages(line: str, other: str) -> None:
    seen = found(line)
    *_, (_, command) = to_do_with(seen, RUN, str(seen.layout), Asked())
    assert command == f"shoal schedule {other} --run {RUN}"
