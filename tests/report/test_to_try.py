"""What a run that has ended says to try next."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config import load
from shoal.report.console import _next
from shoal.report.to_try import to_try
from shoal.train.verify import TOLERANCE

RUN = Path(__file__).parents[2] / "runs" / "tiny.toml"


@pytest.mark.parametrize(
    ("layout", "compared"),
    [
        ("dp=1", "dp=2"),
        ("dtype=bf16", "dp=2,dtype=float64"),
        ("dp=4,mb=2", "dp=4,mb=2"),
        ("dp=2,zero=3{gather=int8},dtype=bf16{grads=bf16}", "dp=2,zero=3,dtype=float64"),
        ("pp=2:zb-v,mb=4,dtype=float64", "pp=2:zb-v,mb=4,dtype=float64"),
    ],
)
def test_the_layout_to_verify_is_the_runs_own_and_one_that_verify_takes(layout: str, compared: str) -> None:
    steps = dict(_next(load(RUN), Path("out/tiny"), 20, layout, []))
    command = steps["proof that a layout computes it"]
    assert command == f"shoal verify out/tiny/run.toml --layout {compared}"
    assert compared.partition("dtype=")[2] in {"", *TOLERANCE}


def test_what_was_written_is_to_be_reported() -> None:
    written = [command for _, command in _next(load(RUN), Path("out/tiny"), 20, "dp=2", ["trace", "memory"])]
    assert {"shoal report out/tiny", "shoal report out/tiny --memory"} <= {*written}
    assert not any("report" in command for _, command in _next(load(RUN), Path("out/tiny"), 20, "dp=2", []))
    assert not any("verify" in one for _, one in _next(load(RUN, ["data.batch=3"]), Path("out"), 20, "dp=1", []))


def test_nothing_is_said_where_there_is_nothing_to_try() -> None:
    assert to_try([]) == ""
    assert to_try([("a", "b"), ("longer [x]", "c")]).splitlines()[1:] == [
        "What to try next:",
        "  a           [bold]b[/]",
        r"  longer \[x]  [bold]c[/]",
    ]
