"""``shoal plan``: what it prints, its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from shoal.cli import app

RUN = str(Path(__file__).parents[2] / "runs" / "tiny.toml")


def test_json_has_the_plans_best_first_and_the_reasons() -> None:
    result = CliRunner().invoke(app, ["plan", RUN, "--cluster", "laptop", "--layout", "dp=4", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    seconds = [plan["step_s"] for plan in said["plans"]]
    assert seconds == sorted(seconds)
    assert {"layout", "step_s", "memory_gib", "terms", "interval_s"} <= said["plans"][0].keys()
    assert said["own"]["layout"].startswith("dp=4")
    assert said["binding"]


def test_the_table_explains_the_best() -> None:
    result = CliRunner().invoke(app, ["plan", RUN, "--cluster", "laptop"])
    assert result.exit_code == 0, result.output
    for words in ("What binds:", "Time:", "Memory, of 4 GiB", "four of five", "shoal train"):
        assert words in result.output


def test_a_layout_that_breaks_a_rule_is_refused_with_a_legal_one() -> None:
    result = CliRunner().invoke(app, ["plan", RUN, "--cluster", "laptop", "--layout", "dp=3"])
    assert result.exit_code != 0
    assert "use dp=4 or 3 ranks" in str(result.exception)
