"""``--layout auto``: the layout that is taken keeps to its budget by its own code, and is the planner's first that
does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.cli import auto as automatic
from shoal.cli.auto import chosen, peak_of
from shoal.config import Config, load
from shoal.errors import ConfigError
from shoal.layout import Layout

RUN = Path(__file__).parents[2] / "runs" / "tiny.toml"
SMALL = ("model.layers=1", "data.seq_len=8", "model.vocab=64", "data.batch=4", "layout.dtype=float32")


@pytest.fixture(autouse=True)
def _unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(automatic, "_SHARES", (1.0,))
    monkeypatch.setattr(automatic, "_PLANS", 2)


def run(*more: str) -> Config:
    return load(RUN, (*SMALL, *more))


@pytest.mark.parity
def test_the_choice_fits_the_world_and_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    free = chosen(run(), Layout(auto=True), 2, quiet=True)
    assert free.ranks == 2
    assert not free.auto
    most = peak_of(run(), free)
    budget = 0.8 * most / 2**30
    seen: list[tuple[str, int]] = []

    def watched(config: Config, layout: Layout, limit: int | None = None) -> int:
        seen.append((str(layout), peak := peak_of(config, layout, limit)))
        return peak

    monkeypatch.setattr(automatic, "peak_of", watched)
    tight = chosen(run(f"memory.budget_gib={budget}"), Layout(auto=True), 2, quiet=True)
    assert tight.ranks == 2
    assert peak_of(run(), tight) <= budget * 2**30 < most
    assert seen[-1][0] == str(tight)
    assert all(peak > automatic._SAFE * budget * 2**30 for _, peak in seen[:-1])


def test_a_budget_that_nothing_fits_is_refused_with_one_that_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "peak_of", lambda config, layout, limit=None: 3 * 2**20)
    said = r"memory\.budget_gib = 0\.001: none of \d+ layouts for it fits: .* needs 3\.00 MiB; use 0\.0031 or more"
    with pytest.raises(ConfigError, match=said):
        chosen(run("memory.budget_gib=0.001"), Layout(auto=True), 2, quiet=True)
    assert chosen(run("memory.budget_gib=0.0031"), Layout(auto=True), 2, quiet=True).ranks == 2


def test_its_dtype_is_kept() -> None:
    assert chosen(run(), Layout.parse("auto,dtype=bf16"), 1, quiet=True).dtype == "bf16"


@pytest.mark.parity
def test_verify_passes_under_what_is_chosen() -> None:
    sets = [word for one in SMALL for word in ("--set", one)]
    result = CliRunner().invoke(app, ["verify", str(RUN), "--layout", "auto,dtype=float64", *sets, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["agree"]


@pytest.mark.parity
def test_plans_that_run_are_told_with_the_fastest_first() -> None:
    command = ["plan", str(RUN), "--cluster", "2xcpu", "--measure", "2", "--json"]
    result = CliRunner().invoke(app, [*command, *(word for one in SMALL for word in ("--set", one))])
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    seconds = [one["step_s"] for one in said["measured"]]
    assert len(seconds) == 2
    assert seconds == sorted(seconds)
    assert said["winner"] == said["measured"][0]["layout"]


def test_a_cluster_larger_than_this_machine_is_not_measured() -> None:
    result = CliRunner().invoke(app, ["plan", str(RUN), "--cluster", "2048x8xh100", "--measure", "3"])
    assert "--measure = 3: the cluster has 16,384 ranks" in str(result.exception)
