"""The command that lays a step over its simulation, as a person or a script meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from traces import made_up
from whole_runs import Shoal, refused

from shoal.cli.common import tell_next
from shoal.config import load, toml
from shoal.pipeline.program import Op
from shoal.pipeline.trace_file import to_chrome

TINY = Path(__file__).parents[1] / "runs" / "tiny.toml"


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    return Shoal(capfd, monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with a trace."""
    folder = tmp_path / "run"
    folder.mkdir()
    trace = made_up("pp=2:zb-v,mb=4", 0.001, lambda step, act: 1e-3 * step * (act.op is Op.FORWARD))
    (folder / "trace.json").write_text(json.dumps(to_chrome(trace, ["rank 0", "rank 1"])), encoding="utf-8")
    (folder / "run.toml").write_text(toml(load(TINY)), encoding="utf-8")
    return folder


def test_a_person_is_shown_both_their_numbers_and_what_to_do_next(shoal: Shoal, run: Path) -> None:
    result = shoal("report", run)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[0] == "zb-v: 2 ranks × 2 stages, 4 micro-batches, step 4"
    for words in ("1.000 of simulated: first pass to last", "bubble/work", "longest waits"):
        assert words in result.out
    steps = result.out.partition("What to try next:")[2]
    for command in (f"shoal report {run} --out {run}/report.svg", f"open {run}/trace.json at", "shoal schedule list"):
        assert command in steps


def test_a_script_gets_the_keys_that_it_relies_on(shoal: Shoal, run: Path) -> None:
    by_folder = json.loads(shoal("report", run, "--json").out)
    assert by_folder == json.loads(shoal("report", run / "trace.json", "--json").out)
    assert by_folder["ratio"] == pytest.approx(1)
    assert by_folder["step"] == 4
    assert json.loads(shoal("report", run, "--json", "--step", 5).out)["step"] == 5


@pytest.mark.parametrize("name", ["report.svg", "report.html"])
def test_it_is_drawn_where_it_is_told(shoal: Shoal, run: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    result = shoal("report", run, "--out", path)
    assert (result.code, result.err) == (0, "")
    assert f"picture: {path}" in result.out
    assert "zb-v: 2 ranks × 2 stages" in path.read_text(encoding="utf-8")
    assert "--out" not in result.out.partition("What to try next:")[2]


def test_where_there_is_no_trace_the_command_that_writes_one_is_named(shoal: Shoal, run: Path, tmp_path: Path) -> None:
    (run / "trace.json").unlink()
    command = f"shoal train {run}/run.toml --set run.name=run-traced --set run.stop=5 --trace --fresh writes one"
    refused(shoal("report", run), f"RUN = {run}: has no trace.json; {command}")
    refused(
        shoal("report", tmp_path / "none"), "is neither the folder of a run nor a trace; shoal train RUN.toml --trace"
    )


def test_that_command_makes_a_trace_that_is_long_enough_for_its_layout(shoal: Shoal, run: Path) -> None:
    (run / "trace.json").unlink()
    deep = load(TINY, ["layout.pp=8:pipedream", "layout.mb=2", "checkpoint.every=3"])
    (run / "run.toml").write_text(toml(deep), encoding="utf-8")
    refused(shoal("report", run), "--set run.stop=11 --set checkpoint.every=0 --trace --fresh writes one")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (lambda trace: trace[: len(trace) // 2], ("is cut short or damaged", "write it anew with shoal train")),
        (lambda trace: trace[:-1], ("is cut short or damaged",)),
        (lambda _: "", ("is no trace: it is not JSON",)),
        (lambda _: "[1, 2]", ("is no trace of shoal train",)),
        (lambda _: '{"traceEvents": []}', ("is no trace of shoal train: not what shoal train --trace writes",)),
        (lambda trace: trace.encode("utf-16").decode("latin-1"), ("is no trace: it is not",)),
    ],
)
def test_a_file_that_is_no_whole_trace_is_told(shoal: Shoal, run: Path, text, words: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    file = run / "trace.json"
    file.write_text(text(file.read_text(encoding="utf-8")), encoding="latin-1")
    refused(shoal("report", run), f"RUN = {file}: ", *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step", 7], ("--step = 7", "3, 4, 5", "use 5")),
        (["--rank", 4], ("--rank = 4", "2 ranks")),
        (["--out", "a.png"], ("--out = a.png", "use a.svg")),
    ],
)
def test_what_cannot_be_shown_is_refused(
    shoal: Shoal, run: Path, arguments: list[object], words: tuple[str, ...]
) -> None:
    refused(shoal("report", run, *arguments), *words)


def test_help_has_an_example(shoal: Shoal) -> None:
    result = shoal("report", "--help")
    assert (result.code, result.err) == (0, "")
    assert "Example: shoal report " in result.out
    assert "--json" in result.out


def test_it_does_without_torch(run: Path) -> None:
    code = (
        "import sys\n"
        "from shoal.cli import main\n"
        f"sys.argv = ['shoal', 'report', {str(run)!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "zb-v: 2 ranks" in done.stdout


def test_where_there_is_nothing_to_try_next_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    tell_next([])
    assert capsys.readouterr().out == ""
    tell_next([("a picture", "shoal report out --out a.svg")])
    assert "shoal report out --out a.svg" in capsys.readouterr().out
