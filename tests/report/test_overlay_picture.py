"""The picture of a step over its simulation, read back: everything is where it happened, and can be read."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from traces import made_up

from shoal.errors import ConfigError
from shoal.pipeline.program import PASSES, Op
from shoal.report.overlay import Overlay, overlay
from shoal.report.overlay_picture import overlay_html, overlay_svg, picture_path, write_picture
from shoal.report.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = ["pp=4,mb=8", "pp=8:zb-v,mb=16", "pp=2:dualpipe-v,mb=5", "pp=4:pipedream,mb=4", "mb=1"]


@cache
def seen_of(line: str) -> Overlay:
    return overlay(made_up(line, 0.002, lambda _, act: {Op.UPDATE: 0.005}.get(act.op, 0.0)))


@cache
def svg_of(line: str) -> str:
    return overlay_svg(seen_of(line))


def boxes(root: ET.Element, css: str) -> list[tuple[float, float, float, float]]:
    """Left, top, right, bottom of the shapes of a class; the first is in the legend."""
    found = []
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == css and (rect := group.find(f"{SVG}rect")) is not None:
            x, y, width, height = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
            found.append((x, y, x + width, y + height))
    return found[1:]


@pytest.mark.parametrize("line", LAYOUTS)
def test_every_pass_is_in_its_lane_when_it_happened(line: str) -> None:
    seen, root = seen_of(line), ET.fromstring(svg_of(line))
    lanes = boxes(root, "idle")
    left, right = lanes[0][0], max(lane[2] for lane in lanes)
    end = max(seen.measured.end, seen.simulated.end)
    bands = round(len(lanes) / (2 * len(seen.ranks)))
    unit = (right - left) * bands / end  # pixels a millisecond
    drawn = {css: boxes(root, css) for css in {f"{op.value}{chunk}" for op in seen.ops for chunk in (0, 1)}}
    for place, pair in enumerate(zip(seen.measured.lanes, seen.simulated.lanes, strict=True)):
        for which, slices in enumerate(pair):
            mine = lanes[2 * place + which :: 2 * len(seen.ranks)]
            for css, found in drawn.items():
                there = [
                    one
                    for one in slices
                    if one.act.op.value == css[0] and seen.stages[place].index(one.act.stage) == int(css[1])
                ]
                wide = sum(box[2] - box[0] for lane in mine for box in found if lane[1] <= box[1] <= box[3] <= lane[3])
                assert wide == pytest.approx(sum(one.stop - one.start for one in there) * unit, abs=2 * len(there) + 1)
            first = next(one for one in slices if one.act.op in PASSES)
            starts = [box[0] for one in drawn.values() for box in one if mine[0][1] <= box[1] <= box[3] <= mine[0][3]]
            assert min(starts) == pytest.approx(left + unit * first.start, abs=1)


@pytest.mark.parametrize("line", LAYOUTS)
def test_no_text_meets_another_or_leaves_the_picture(line: str) -> None:
    root = ET.fromstring(svg_of(line))
    width, height = (float(root.attrib[key]) for key in ("width", "height"))
    found = []
    for one in root.iter(f"{SVG}text"):
        x, y, size = (float(one.attrib[key]) for key in ("x", "y", "font-size"))
        wide = text_width(one.text or "", size, bold="font-weight" in one.attrib)
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor", "start")] * wide
        found.append((one.text, left, y - 0.75 * size, left + wide, y + 0.1 * size))
    assert len(found) > 20
    assert [one for one in found if one[1] < 0 or one[2] < 0 or one[3] > width or one[4] > height] == []
    rows: dict[int, list[tuple[str | None, float, float, float, float]]] = {}
    for box in found:
        for row in {int(box[2] // 40), int(box[4] // 40)}:  # what meets is in the same one
            rows.setdefault(row, []).append(box)
    assert [
        (one[0], other[0])
        for row in rows.values()
        for one, other in combinations(row, 2)
        if one[1] < other[3] and other[1] < one[3] and one[2] < other[4] and other[2] < one[4]
    ] == []


def test_whoever_points_at_an_action_is_told_what_it_is_and_what_it_waited() -> None:
    seen = seen_of("pp=4,mb=8")
    titles = [title.text for title in ET.fromstring(svg_of("pp=4,mb=8")).iter(f"{SVG}title")]
    assert any("the forward pass of stage 1, micro-batch 0: " in str(title) for title in titles)
    assert any("after waiting" in str(title) for title in titles)
    assert any(str(title).startswith("the update: ") for title in titles)
    passes = sum(one.act.op in PASSES for lane in (*seen.measured.lanes, *seen.simulated.lanes) for one in lane)
    assert sum(" pass of stage " in str(title) for title in titles) == passes


def test_what_was_done_before_a_wait_is_drawn_before_it() -> None:
    seen = seen_of("pp=4,mb=8")
    (rank, at, one) = next(
        (rank, at, one)
        for rank, lane in enumerate(seen.measured.lanes)
        for at, one in enumerate(lane)
        if one.act.op in PASSES and one.waited > 1
    )
    lanes = list(seen.measured.lanes)
    lanes[rank] = (*lanes[rank][:at], one._replace(waited=one.waited - 1, before=1.0), *lanes[rank][at + 1 :])
    root = ET.fromstring(overlay_svg(replace(seen, measured=replace(seen.measured, lanes=tuple(lanes)))))
    (drawn,) = [group for group in root.iter(f"{SVG}g") if len(group.findall(f"{SVG}rect")) > 1]
    before, after = ([float(box.attrib[key]) for key in ("x", "width")] for box in drawn.findall(f"{SVG}rect"))
    unit = (after[1] + 1) / (one.stop - one.start)
    assert before[0] == pytest.approx(after[0] - one.waited * unit, abs=1)
    assert before[1] == pytest.approx(unit, abs=2)
    assert str(drawn.findtext(f"{SVG}title")).endswith("and, before that, working 1.00 ms")


@pytest.mark.parametrize("line", LAYOUTS)
def test_dark_and_light_have_rules_for_everything_that_is_drawn(line: str) -> None:
    svg = svg_of(line)
    light, _, dark = svg.partition("@media (prefers-color-scheme: dark)")
    for css in {group.attrib["class"] for group in ET.fromstring(svg).iter(f"{SVG}g")}:
        assert f".{css} rect{{fill:" in light
        assert f".{css} rect{{fill:" in dark


def test_the_file_says_which_kind(tmp_path: Path) -> None:
    seen = seen_of("mb=1")
    for name, start in (("a.svg", "<svg"), ("deep/b.HTML", "<!doctype html>")):
        write_picture(seen, picture_path(tmp_path / name))
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    assert overlay_svg(seen) in overlay_html(seen)
    with pytest.raises(ConfigError, match=r"--out = a.png: is not the name of an SVG or HTML file; use a.svg"):
        picture_path(Path("a.png"))
    with pytest.raises(ConfigError, match=r"--out = .*: cannot be written"):
        write_picture(seen, tmp_path / "a.svg" / "c.svg")
