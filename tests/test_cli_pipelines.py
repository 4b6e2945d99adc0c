"""The command that shows pipeline schedules, as a person or a script meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import Shoal, refused


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    return Shoal(capfd, monkeypatch)


def test_a_person_is_shown_the_timeline_its_numbers_and_what_to_do_next(shoal: Shoal) -> None:
    result = shoal("schedule", "1f1b", "-p", 4, "-m", 8)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "1f1b: 4 ranks, 8 micro-batches"
    assert [line.split()[-1] for line in lines if line.startswith("rank ")] == ["4", "3", "2", "1"]
    for words in ("makespan", "37.5%", "27.3%", "4, 3, 2, 1 on ranks 0–3", "weight versions"):
        assert words in result.out
    steps = result.out.partition("What to try next:")[2]
    for command in ("shoal schedule zb-h1 -p 4 -m 8", "--times 1,1.2,0.8,0.1", "--picture out/1f1b.svg"):
        assert command in steps
    assert "shoal verify runs/tiny.toml --layout pp=4,mb=8" in steps


def test_a_script_gets_the_keys_that_it_relies_on(shoal: Shoal) -> None:
    result = shoal("schedule", "interleaved", "-p", 4, "-m", 8, "-v", 4, "--times", "1,1,1,0", "--json")
    said = json.loads(result.out)
    assert said["makespan"] == pytest.approx(24 + 9 / 4)
    assert said["bubble"] == pytest.approx({"per_work": 9 / 96, "share": 9 / 105, "span": 9 / 4})
    assert said["peak_live"] == [(2 * (3 - rank) + 13) / 4 for rank in range(4)]
    assert said["weight_versions"] == [1] * 4
    assert len(said["timeline"]) == 4
    assert said["timeline"][1][0] == {"pass": "F", "stage": 1, "micro_batch": 0, "start": 0.25, "stop": 0.5}


def test_versions_of_a_stream(shoal: Shoal) -> None:
    said = json.loads(shoal("schedule", "pipedream", "-p", 4, "-m", 8, "--json").out)
    assert (said["makespan"], said["weight_versions"]) == (24, [4, 3, 2, 1])
    assert said["bubble"] == pytest.approx({"per_work": 0, "share": 0, "span": 0})


@pytest.mark.parametrize("name", ["zb-v.svg", "zb-v.html"])
def test_it_is_drawn_where_it_is_told(shoal: Shoal, tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    result = shoal("schedule", "zb-v", "-p", 2, "-m", 4, "--picture", path)
    assert (result.code, result.err) == (0, "")
    assert f"picture: {path}" in result.out
    assert "zb-v: 2 ranks × 2 stages, 4 micro-batches" in path.read_text(encoding="utf-8")
    assert "--picture" not in result.out.partition("What to try next:")[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["zbh1", "-p", 4, "-m", 8], ("NAME = zbh1", "did you mean 'zb-h1'?", "gpipe, 1f1b")),
        (["interleaved", "-p", 4, "-m", 6], ("-m = 6", "multiples of 4", "use -m 4 or -m 8")),
        (["interleaved/4", "-p", 4, "-m", 8], ("NAME = interleaved/4", "use interleaved -v 4")),
        (["1f1b", "-m", 8], ("-p = (nothing): how many ranks", "use -p 4", "--run RUN.toml")),
        (["1f1b", "-p", 4], ("-m = (nothing): how many micro-batches", "use -m 4")),
        (["1f1b", "-p", 0, "-m", 8], ("-p = 0: ", "use 1 or more")),
        (["1f1b", "-p", "four", "-m", 8], ("-p = four: ", "use a whole number such as 4")),
        (["list", "-p", 4, "-m", 8, "--memory", "much"], ("--memory = much: ", "use a number such as 0.5")),
        (["zb-v", "-p", 4, "-m", 8, "-v", 3], ("-v = 3", "exactly 2 stages")),
        (["1f1b", "-p", 4, "-m", 8, "--times", "1,2"], ("--times = 1,2", "four numbers")),
        (["1f1b", "-p", 4, "-m", 8, "--times", "1e13,1,1,1"], ("--times = 1e13,1,1,1", "from 0 to below 1e12")),
        (["list", "-p", 4, "-m", 8, "--memory", "inf"], ("--memory = inf", "fewer than 1e12", "use --memory 1")),
        (["1f1b", "-p", 4, "-m", 8, "--picture", "a.png"], ("--picture = a.png", "use a.svg")),
    ],
)
def test_what_cannot_be_shown_is_refused(shoal: Shoal, arguments: list[object], words: tuple[str, ...]) -> None:
    refused(shoal("schedule", *arguments), *words)


def test_what_to_try_next_stands_apart_from_what_it_is_for(shoal: Shoal) -> None:
    tips = (
        shoal("schedule", "pipedream-vertical", "-p", 2, "-m", 2).out.partition("What to try next:\n")[2].splitlines()
    )
    assert len({tip.index("shoal ") for tip in tips}) == 1
    assert all("  shoal " in tip for tip in tips)


def test_help_has_an_example(shoal: Shoal) -> None:
    result = shoal("schedule", "--help")
    assert (result.code, result.err) == (0, "")
    assert "Example: shoal schedule " in result.out
    assert "--json" in result.out


def test_it_does_without_torch() -> None:
    code = (
        "import sys\n"
        "from shoal.cli import main\n"
        "sys.argv = ['shoal', 'schedule', 'zb-v', '-p', '2', '-m', '4']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "zb-v: 2 ranks" in run.stdout
