"""The command that runs one rank of a job by itself, as a person or a script meets it."""

from __future__ import annotations

import json

import pytest
from whole_runs import Shoal, refused


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    return Shoal(capfd, monkeypatch)


SMALL = ("--set", "model.layers=2", "--set", "data.seq_len=8")


def test_a_person_is_shown_memory_words_actions_and_what_to_do_next(shoal: Shoal) -> None:
    result = shoal("dryrun", "runs/tiny.toml", "--layout", "dp=-1,pp=2,mb=2", "--world", 8, "--rank", 5, *SMALL)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("rank 5 of 8 of tiny, dry")
    assert any(line.startswith("rank 5 (pp 1, dp 1) needs ") for line in lines)
    assert "layout dp=4,pp=2,mb=2,dtype=float64, 8 ranks" in " ".join(lines)
    rows = {tuple(line.split()[:2]) for line in lines}
    assert {("parameters", "0.58"), ("on", "the"), ("message", "from"), ("all-reduce", "dp"), ("in", "all")} <= rows
    assert "2 forward passes, 2 backward passes" in result.out
    steps = result.out.partition("What to try next:")[2]
    assert "--layout dp=4,pp=2,mb=2,dtype=float64 --rank 1 --set model.layers=2 --set data.seq_len=8" in steps
    assert "shoal layout" in steps


def test_a_script_gets_the_keys_that_it_relies_on(shoal: Shoal) -> None:
    said = json.loads(shoal("dryrun", "runs/tiny.toml", "--layout", "dp=2", "--rank", 1, "--json", *SMALL).out)
    assert {"peak_bytes", "collectives", "actions"} <= said.keys()
    assert said["even_load"] is False
    assert said["actions"] == ["F0.0", "B0.0", "R0", "N", "U"]
    (gradients,) = (one for one in said["collectives"] if one["purpose"] == "gradients")
    assert gradients["bytes"] == 8 * gradients["words"]


def test_what_is_taken_for_granted_about_experts_is_said(shoal: Shoal) -> None:
    run = ("dryrun", "runs/tiny-moe.toml", "--layout", "dp=2,ep=2", *SMALL)
    assert "as many tokens for each expert" in " ".join(shoal(*run).out.split())
    assert json.loads(shoal(*run, "--json").out)["even_load"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layout", "dp=2", "--rank", 2), "--rank = 2: the world has 2 ranks; use 0 to 1"),
        (("--layout", "dp=2", "--world", 3), "dp·cp·tp·pp = 2 ranks, but the world has 3"),
        (("--layout", "dp=-1,tp=4", "--world", 6), "6 ranks are not a multiple"),
        (("--layout", "dp=16", "--world", 16), "layout.dp = 16"),
        (("--layout", "pp=4,mb=4", "--set", "model.layers=2"), "4 stages are more than the model's 2 layers"),
        (("--layout", "pp=4:interleaved/2,mb=6"), "layout.mb = 6"),
        (("--layout", "dp=2,offload=optimizer:nvme"), "use optimizer:cpu"),
    ],
)
def test_what_the_job_would_be_refused_for(shoal: Shoal, arguments: tuple[object, ...], words: str) -> None:
    refused(shoal("dryrun", "runs/tiny.toml", *arguments), words)
