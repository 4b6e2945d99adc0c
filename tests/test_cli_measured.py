"""The command that shows a schedule with the measured layers of a run file's model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from whole_runs import Shoal, refused

from shoal.layout import Layout

RUN = Path(__file__).parents[1] / "runs" / "tiny6.toml"
SMALL = [
    part
    for one in ("model.layers=3", "model.hidden=12", "model.ffn=8", "model.vocab=19", "data.seq_len=5", "data.batch=4")
    for part in ("--set", one)
]


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of the process that runs the tests
    return Shoal(capfd, monkeypatch)


def test_a_person_is_told_what_is_measured_and_which_layout_to_use(shoal: Shoal) -> None:
    result = shoal("schedule", "list", "-p", 2, "-m", 2, "--transfer", 0.5, "--run", RUN, *SMALL)
    assert (result.code, result.err) == (0, "")
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
        (["zb-h1", "-p", 2, "-m", 5, "--run", RUN], ("a global batch of 24 samples does not divide",)),
    ],
)
def test_what_cannot_be_measured_is_refused(shoal: Shoal, arguments: list[object], words: tuple[str, ...]) -> None:
    refused(shoal("schedule", *arguments), *words)
