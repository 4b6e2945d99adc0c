"""``shoal train --trace``: the file, and what a person and the metrics are told of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import Shoal, events, make_store, refused, sets, write_run

from shoal.layout import Layout


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize(
    ("layout", "stages", "steps", "simulated"),
    [
        ("pp=2:zb-v,mb=4", [[0, 3], [1, 2]], (3, 4, 5), True),
        ("dp=2", [[0], [0]], (3, 4, 5), True),
        ("pp=2:pipedream,mb=4", [[0], [1]], (3, 4, 5, 6), False),
    ],
)
def test_a_traced_run_leaves_the_steps_after_two(
    store: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    stages: list[list[int]],
    steps: tuple[int, ...],
    simulated: bool,
) -> None:
    file = write_run(tmp_path, store)
    result = Shoal(capfd, monkeypatch)(
        "train", file, "--layout", layout, "--trace", *sets(run__steps=6, model__layers=4)
    )
    assert (result.code, result.err) == (0, "")
    path = tmp_path / "out" / "run" / "trace.json"
    assert f"trace of steps 3 to {steps[-1]}: {path}; shoal report {path.parent} lays it over" in result.out
    (told,) = events(tmp_path / "out" / "run", "trace")
    assert ("late" in told) == simulated
    if simulated:
        assert {row["stage"] for row in told["late"]} == {stage for of_rank in stages for stage in of_rank}
        assert told["passes_ms"] > 0
    entries = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [one for one in entries if one["ph"] == "X"]
    for rank, of_rank in enumerate(stages):
        passes = [one for one in spans if one["pid"] == rank and one["cat"] == "pass"]
        assert sorted({one["tid"] - 1 for one in passes}) == of_rank
        assert {one["args"]["step"] for one in passes} == {*steps}
        if "pp" in layout:
            taken_in = [one["args"] for one in passes if one["args"]["waited_us"]]
            assert all(args["before_us"] > 0 for args in taken_in), "a rank does what it can before it waits"
        ends = [one["ts"] + one["dur"] for one in passes]
        starts = [one["ts"] for one in passes]
        assert all(end <= start + 1 for end, start in zip(ends, starts[1:], strict=False)), "one thing after another"
    report = Shoal(capfd, monkeypatch)("report", tmp_path / "out" / "run", "--json")
    assert (report.code, report.err) == (0, "")
    said = json.loads(report.out)
    assert said["step"] in (steps if simulated else (4, 5))
    if simulated:
        both = [told["passes_ms"], told["simulated_ms"]]
        assert [*said["step_ms"].values()] == pytest.approx(both, rel=1e-6), "the same step and the same simulation"
    assert said["stages"] == (stages if "pp" in layout else stages[:1])
    assert said["layout"] == str(Layout.parse(f"{layout},dtype=float64"))
    for measured, simulation in zip(said["timeline"]["measured"], said["timeline"]["simulated"], strict=True):
        done, foreseen = (
            [one["action"] for one in lane if one["action"][0] in "FBIW"] for lane in (measured, simulation)
        )
        assert done == foreseen or not simulated, "the program that ran is the one that is simulated"


def test_a_run_without_steps_left_has_nothing_to_trace(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, shoal = write_run(tmp_path, store), Shoal(capfd, monkeypatch)
    traced, saved = ("train", file, "--trace"), tmp_path / "out" / "run" / "step-00000001"
    stopped = sets(run__steps=2, run__stop=1)
    assert shoal(*traced, *stopped).code == 0
    for more, key in ((sets(run__steps=1), "run.steps"), (stopped, "run.stop")):
        problem = "the run is complete, and no step after 1 is left to look at; start anew with --fresh, or raise "
        for option in ("--trace", "--memory"):
            refused(shoal("train", file, option, *more), f"{option} = {saved}: {problem}{key}")
    assert shoal("train", file, *stopped).code == 0, "without --trace there is nothing wrong with it"
    assert shoal(*traced, *sets(run__steps=2)).code == 0
    assert [(one["first"], one["steps"]) for one in events(tmp_path / "out" / "run", "trace")] == [(1, 1), (2, 1)]
    assert shoal(*traced, "--fresh", *sets(run__steps=1)).code == 0
