"""The memory of a step as a picture and in a terminal, read back."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from io import StringIO
from itertools import combinations
from pathlib import Path

import pytest
from rich.console import Console

from shoal.errors import ConfigError
from shoal.memory.account import BACKWARD, BEFORE, FORWARD, UPDATE, Memory, Moment, RankMemory, read
from shoal.purposes import ACTIVATIONS, COMMUNICATION, GRADIENTS, LOGITS, OUTSIDE, PARAMETERS, STATES, WORKSPACE
from shoal.report.memory_colours import colour, css_name
from shoal.report.memory_file import memory_path, read_memory
from shoal.report.memory_picture import memory_svg, picture_path, write_picture
from shoal.report.memory_terminal import memory_report
from shoal.report.memory_words import OTHER, SHOWN, WORDS, headline, next_steps, parts, shown, unit_of
from shoal.report.pipeline_colours import DARK, LIGHT, contrast
from shoal.report.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"
MIB = 2**20


def rank(number: int, scale: int = 1, hosted: int = 0) -> RankMemory:
    host = {STATES: hosted - hosted // 3, ACTIVATIONS: hosted // 3} if hosted else {}
    stays = {PARAMETERS: 2 * MIB * scale, STATES: 8 * MIB, GRADIENTS: 2 * MIB}
    phases = {
        BEFORE: Moment(stays, {}),
        FORWARD: Moment(stays | {ACTIVATIONS: 20 * MIB, LOGITS: 3 * MIB, OUTSIDE: 1000}, host),
        BACKWARD: Moment(stays | {ACTIVATIONS: 15 * MIB, COMMUNICATION: MIB, WORKSPACE: 3 * MIB}, host),
        UPDATE: Moment(stays, {}),
    }
    return RankMemory(f"rank {number} (dp {number})", phases)


def memory(ranks: int = 2, host: int = 0) -> Memory:
    return Memory("dp=2,dtype=bf16", 2, tuple(rank(number, number + 1, host) for number in range(ranks)))


def test_the_parts_of_a_bar_are_all_there_was() -> None:
    for moment in memory().moments:
        assert sum(parts(moment).values()) == moment.total
    assert parts(memory().ranks[0].phases[BACKWARD])[OTHER] == 3 * MIB
    assert parts(Moment({"unheard of": 5}, {}))[OTHER] == 5


def test_a_file_is_read_back_and_one_whose_parts_are_not_its_total_is_not() -> None:
    document = json.loads(json.dumps(memory(host=7).as_json()))
    assert read(document) == memory(host=7)
    document["ranks"][1]["phases"][FORWARD]["total"] += 1
    with pytest.raises(ValueError, match="forward: its parts are"):
        read(document)
    for wrong in (
        [],
        {},
        {"ranks": []},
        {"layout": "", "step": 1, "ranks": []},
        {"ranks": [{"phases": {"forward": 1}}]},
    ):
        with pytest.raises(ValueError, match=r"not what|no phase"):
            read(wrong)


@pytest.mark.parametrize("host", [0, 30 * MIB])
def test_bars_are_as_long_as_there_are_bytes(host: int) -> None:
    seen = memory(host=host)
    root = ET.fromstring(memory_svg(seen))
    drawn: dict[str, float] = {}
    for group in root.iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is not None and rect is not None and title.text is not None:
            drawn[title.text.rsplit(", ", 1)[0] if "% of" not in title.text else title.text.rsplit(", ", 2)[0]] = float(
                rect.attrib["width"]
            )
    unit = (drawn["rank 0 (dp 0), before the first step: optimizer states, with masters"] + 1) / 8
    expected = {f"rank 0 (dp 0), forward: {WORDS[ACTIVATIONS]}": 20, f"rank 1 (dp 1), update: {WORDS[PARAMETERS]}": 4}
    expected |= {f"rank 1 (dp 1), backward: {WORDS[OTHER]}": 3}
    for name, mib in expected.items():
        assert drawn[name] == pytest.approx(unit * mib, abs=1.5), name
    hosts = {name.split("host, ")[1]: width for name, width in drawn.items() if "on the host" in name}
    assert hosts == {
        WORDS[part]: pytest.approx(unit * mib, abs=1.5) for part, mib in ((STATES, 20), (ACTIVATIONS, 10)) if host
    }
    bars = [one.attrib for one in root.iter(f"{SVG}rect") if "y" in one.attrib]
    axis = next(one.attrib["d"] for one in root.iter(f"{SVG}path") if "H" in one.attrib["d"])
    longest = max(float(bar["x"]) + float(bar["width"]) for bar in bars)
    assert longest == pytest.approx(float(axis.partition("H")[2]), abs=1.5), "the axis is as long as the longest bar"


def test_parts_too_narrow_for_their_numbers_are_told_beside_the_bar() -> None:
    moment = Moment({PARAMETERS: 100 * MIB, LOGITS: MIB // 2, STATES: 10}, {ACTIVATIONS: MIB // 4, STATES: 90 * MIB})
    seen = Memory("dp=1", 2, (RankMemory("rank 0", {FORWARD: moment}),))
    texts = [one.text for one in ET.fromstring(memory_svg(seen)).iter(f"{SVG}text")]
    assert "logits 0.50, host activations 0.25" in texts
    assert not any("optimizer states 0.00" in (text or "") for text in texts)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_numbers_of_a_terminal_are_whole_at_any_width(width: int) -> None:
    console = Console(file=StringIO(), width=width, no_color=True, color_system=None)
    console.print(memory_report(memory(host=30 * MIB)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["before", "forward", "backward", "update"] in lines
    assert [line[-2:] for line in lines if line[:2] == ["host:", "optimizer"]] == [["20.0", "20.0"]] * 2
    assert ["optimizer", "states", *["8.00"] * 4] in lines


@pytest.mark.parametrize("seen", [memory(), memory(host=30 * MIB), memory(ranks=40)])
def test_no_text_meets_another_or_leaves_the_picture(seen: Memory) -> None:
    root = ET.fromstring(memory_svg(seen))
    width, height = (float(root.attrib[key]) for key in ("width", "height"))
    found = []
    for one in root.iter(f"{SVG}text"):
        x, y, size = (float(one.attrib[key]) for key in ("x", "y", "font-size"))
        wide = text_width(one.text or "", size, bold="font-weight" in one.attrib)
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor", "start")] * wide
        found.append((one.text, left, y - 0.75 * size, left + wide, y + 0.1 * size))
    assert len(found) > 20
    assert [one for one in found if one[1] < 0 or one[2] < 0 or one[3] > width or one[4] > height] == []
    assert [
        (one[0], other[0])
        for one, other in combinations(found, 2)
        if one[1] < other[3] and other[1] < one[3] and one[2] < other[4] and other[2] < one[4]
    ] == []


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_parts_can_be_told_apart_and_read(theme: object) -> None:
    lightness = theme.only  # type: ignore[attr-defined]
    looks = {part: colour(part, lightness, "#a8b1bc") for part in WORDS}
    assert len({fill for fill, _ in looks.values()}) == len(WORDS)
    assert all(contrast(fill, ink) >= 4.5 for fill, ink in looks.values())
    svg = memory_svg(memory())
    assert all(svg.count(f".{css_name(part)} rect{{fill:") == 2 for part in WORDS), "on light paper and on dark"


@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_shows_bars_and_numbers(colours: bool) -> None:
    console = Console(
        file=StringIO(),
        width=140,
        force_terminal=colours,
        highlight=False,
        color_system="truecolor" if colours else None,
        no_color=not colours,
    )
    console.print(memory_report(memory(host=30 * MIB)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert headline(memory()) in text
    assert "37.0" in text  # 4 + 8 + 2 + 20 + 3
    if not colours:
        rows = [line for line in lines if line.lstrip().startswith(("rank 0", FORWARD, BACKWARD, UPDATE))]
        assert len(rows) == 7 + 1, "bars, and the rank above its numbers"
        (bar,) = [line for line in lines if "AAAA" in line and "35.0 MiB" in line]
        assert bar.count("A") == pytest.approx(20 / 35 * sum(map(bar.count, "PGOAL·")), abs=1)


def test_of_many_ranks_those_that_held_most_are_shown() -> None:
    assert shown(memory(ranks=40)) == list(range(40 - SHOWN, 40))
    assert "40 ranks, the 16 that held most" in memory_svg(memory(ranks=40))
    assert unit_of(memory()).of(3 * MIB) == "3.00"


def test_where_there_is_no_file_the_command_that_writes_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no memory.json; shoal train RUN.toml --memory writes one"):
        memory_path(tmp_path)
    path = tmp_path / "memory.json"
    for text in ("{", '{"ranks": 3}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="write it anew with shoal train"):
            read_memory(path)
    path.write_text(json.dumps(memory().as_json()), encoding="utf-8")
    assert read_memory(memory_path(tmp_path)) == memory()


def test_pictures_are_svg_or_html(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"use .*memory\.svg"):
        picture_path(tmp_path / "memory.png")
    write_picture(memory(), tmp_path / "new" / "memory.html")
    assert (tmp_path / "new" / "memory.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_takes_most_is_what_the_next_command_is_about(tmp_path: Path) -> None:
    steps = dict(next_steps(memory(), tmp_path, drawn=False))
    assert f"--layout {'dp=2,dtype=bf16,recompute=full'}" in steps["less for activations"]
    assert "--memory --out" in steps["a picture of this"]
    again = replace(memory(), layout="dp=2,recompute=full")
    assert "offload=activations:cpu" in dict(next_steps(again, tmp_path, drawn=True))["less for activations"]
