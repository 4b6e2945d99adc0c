"""The load of experts over a run, read from its metrics and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from shoal.errors import ConfigError
from shoal.report.expert_load import load_report, loads_svg, read_loads


def metrics(folder: Path, *steps: tuple[int, dict[str, list[int]]]) -> Path:
    lines = [{"event": "start"}]
    lines += [{"event": "step", "step": step, "expert_tokens": tokens, "dropped": 0.25} for step, tokens in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_load_is_what_an_expert_was_given_over_an_even_share(tmp_path: Path) -> None:
    run = metrics(tmp_path, (1, {"blocks.0": [30, 10]}), (2, {"blocks.0": [9, 9]}), (2, {"blocks.0": [20, 20]}))
    seen = read_loads(run)
    assert seen.steps == (1, 2)
    assert seen.loads == {"blocks.0": [[1.5, 0.5], [1.0, 1.0]]}
    assert seen.largest("blocks.0") == 1.25
    assert seen.cells("blocks.0", 1) == [[1.25], [0.75]]
    assert seen.cells("blocks.0", 2) == [[1.5, 1.0], [0.5, 1.0]]
    assert seen.as_json()["largest"] == {"blocks.0": 1.25}


def test_it_is_shown_without_colours_and_drawn(tmp_path: Path) -> None:
    seen = read_loads(metrics(tmp_path, (1, {"blocks.0": [4, 0]}), (2, {"blocks.0": [0, 4]})))
    console = Console(width=120, no_color=True, record=True)
    with console.capture() as said:
        console.print(load_report(seen))
    assert "25.0% of the tokens dropped" in said.get()
    rows = [line for line in said.get().splitlines() if line.startswith(("    0", "    1"))]
    assert [row[7:].rstrip() for row in rows] == ["@", " @"]
    assert loads_svg(seen).count("<rect") == 2 + 4  # paper and pattern, then cells


def test_a_run_without_experts_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tells of no experts; train a model with model.experts"):
        read_loads(metrics(tmp_path))
    with pytest.raises(ConfigError, match=r"has no metrics.jsonl"):
        read_loads(tmp_path / "nowhere")
