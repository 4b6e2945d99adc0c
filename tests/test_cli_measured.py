"""The command that shows a schedule with the measured layers of a run file's model."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from whole_runs import Shoal, refused

from shoal.cli.common import fewest, read
from shoal.layout import Layout
from shoal.pipeline.layer_costs import LayerCosts
from shoal.train.setup import fit

RUN = Path(__file__).parents[1] / "runs" / "tiny6.toml"
SMALL = [
    part
    for one in ("model.layers=3", "model.hidden=12", "model.ffn=8", "model.vocab=19", "data.seq_len=5", "data.batch=4")
    for part in ("--set", one)
]


COSTS = LayerCosts(
    (0.0, *[0.01] * 4, 0.02), (0.0, *[0.015] * 4, 0.03), (0.0, *[0.005] * 4, 0.01),
    held=(0, 9, 9, 9, 9, 5), kept=(0, 6, 6, 6, 6, 0), output=(1,) * 6, parameters=(50, 10, 10, 10, 10, 50),
)  # fmt: skip
"""Of a model of four blocks."""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many the process was given, which is the one that runs the tests."""
    given: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    return given


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, threads: list[int]) -> Shoal:
    return Shoal(capfd, monkeypatch)


def test_a_person_is_told_what_is_measured_and_which_layout_to_use(shoal: Shoal, threads: list[int]) -> None:
    result = shoal("schedule", "list", "-p", 2, "-m", 2, "--transfer", 0.5, "--run", RUN, *SMALL)
    assert (result.code, result.err) == (0, "")
    assert threads[0] == 3, "as many as each of two local ranks would have"
    assert "CPU, 3 threads" in result.out
    assert "measuring the 5 layers of tiny6, one by one, in this process: micro-batches of 2 samples" in result.out
    head, _, layout = shlex.split(result.out.strip().splitlines()[-1])[-3:]
    plan = Layout.parse(layout)
    assert head.endswith("use:")
    assert (plan.pp, plan.schedule, plan.mb, plan.dtype, sum(plan.stage_layers or ())) == (2, "list", 2, "float64", 3)
    assert plan.list_times is not None
    assert min(plan.list_times) > 0
    assert plan.list_times[3] == 0.5


def test_a_script_gets_the_schedule_and_what_was_measured(shoal: Shoal, tmp_path: Path) -> None:
    """Where it is asked for no ranks and micro-batches, they are the layout's."""
    picture = tmp_path / "zb-v.svg"
    result = shoal(
        "schedule", "zb-v", "--run", RUN, "--layout", "pp=2:list/2{layers=1/1/1/1;times=1/1/1/0;memory=2},mb=4",
        "--balance", "memory", "--picture", picture, "--json", *SMALL, "--set", "model.layers=4",
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    said = json.loads(result.out)
    assert said["layout"] == "pp=2:zb-v{layers=1/1/1/1},mb=4,dtype=float64"
    assert (said["unit"], said["ranks"], said["micro_batches"]) == ("ms", 2, 4)
    assert min(said["peak_bytes"]) > 0
    assert all(one["forward_ms"] > 0 for one in said["layers"])
    assert "zb-v: 2 ranks × 2 stages" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "layout", "expected"),
    [
        ("zb-v", "dp=-1,zero=1,recompute=full,dtype=float32", "dp=-1,pp=2:zb-v,zero=1,mb=2,recompute=full"),
        ("pipedream", "dp=2,zero=1,dtype=bf16", "dp=2,pp=2:pipedream,zero=1,mb=2,dtype=bf16"),
        (
            "list",
            "dp=2,pp=2:list{layers=1/3;memory=1.5},recompute=full{stages=1}",
            "dp=2,pp=2:list{memory=1.5},mb=2,recompute=full{stages=1},dtype=float64",
        ),
        ("1f1b", None, "pp=2,mb=2,dtype=float64"),
    ],
)
def test_what_to_try_next_is_of_the_same_model_and_layout(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch, name: str, layout: str | None, expected: str
) -> None:
    monkeypatch.setattr("shoal.cli.measuring._measure", lambda *_: COSTS)
    options = [*(["--layout", layout] if layout else []), "--balance", "memory", "--transfer", "0.25"]
    result = shoal("schedule", name, "-p", 2, "-m", 2, "--run", RUN, *options, *SMALL, "--set", "model.layers=4")
    assert (result.code, result.err) == (0, "")
    lines = result.out.partition("What to try next:")[2].strip().splitlines()
    train, schedule = (shlex.split(line[line.index("shoal ") :])[1:] for line in lines[:2])

    overrides = [value for option, value in pairwise(train) if option == "--set"]
    assert overrides == [*SMALL[1::2], "model.layers=4"]
    line = train[train.index("--layout") + 1]
    config, plan = read(Path(train[1]), line, overrides)
    assert replace(plan, stage_layers=None, list_times=None) == Layout.parse(expected)
    assert sum(plan.stage_layers or ()) == 4
    fit(config, plan, fewest(plan))
    assert shlex.split(lines[-1])[-1] == line

    again = json.loads(shoal(*schedule, "--json").out)
    _, other = read(Path(train[1]), again["layout"], overrides)
    alike = ("dp", "zero", "recompute", "recompute_stages", "pp", "chunks", "mb", "dtype")
    assert [getattr(other, one) for one in alike] == [getattr(plan, one) for one in alike]
    assert other.schedule != plan.schedule
    assert again["times"]["transfer"] == 0.25
    assert ("--balance", "memory") in pairwise(schedule)


RUNS = ["-p", 2, "-m", 2, "--run", RUN]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["zb-h1", "--run", RUN], ("-p = (nothing)", "use -p 4, or --layout pp=4,mb=8")),
        (["zb-h1", "-p", 2, "-m", 2, "--balance", "time"], ("--balance = time", "name it with --run RUN.toml")),
        (["zb-h1", "-p", 2, "-m", 2, "--layout", "mb=4"], ("--layout = mb=4", "name it with --run RUN.toml")),
        (["zb-h1", *RUNS, "--times", "1,1,1,0"], ("--times = 1,1,1,0", "leave out one of them")),
        (["zb-h1", *RUNS, "--balance", "tim"], ("--balance = tim", "did you mean 'time'?", "use time or memory")),
        (["zbv", *RUNS], ("NAME = zbv", "did you mean 'zb-v'?")),
        (["interleaved", "-p", 2, "-m", 3, "--run", RUN], ("-m = 3", "use -m 2 or -m 4")),
        (["zb-h1", "-p", 8, "-m", 8, "--run", RUN], ("8 stages are more than the model's 6 layers",)),
        (["zb-h1", *RUNS, "--layout", "tp=2"], ("layout.tp = 2", "use tp=1")),
        (["zb-h1", *RUNS, "--transfer", "inf"], ("--transfer = inf", "below 1e+12 ms", "use 0.5")),
        (
            ["zb-h1", "--run", RUN, "--layout", "pp=2,mb=2,recompute=full{stages=1}"],
            ("layout.recompute = full{stages=1}", "use recompute=full, or say what stages have"),
        ),
        (["zb-h1", "-p", 2, "-m", 5, "--run", RUN], ("a global batch of 24 samples does not divide",)),
    ],
)
def test_what_cannot_be_measured_is_refused(shoal: Shoal, arguments: list[object], words: tuple[str, ...]) -> None:
    refused(shoal("schedule", *arguments), *words)
