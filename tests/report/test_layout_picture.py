"""The picture of a layout, read back: what it shows is what is held, and all of it can be read."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal import config
from shoal.errors import ConfigError
from shoal.layout import Layout
from shoal.placement import Box
from shoal.report.colours import Colours
from shoal.report.example import MODEL, example
from shoal.report.layout_picture import layout_picture, picture_path, write_picture
from shoal.report.ownership import Ownership, Share, ownership, shown
from shoal.report.panels import Panel
from shoal.report.svg import INK, PAPER, Canvas, oklch, text_width
from shoal.report.wording import ranks_text
from shoal.train.setup import make_model

LAYOUTS = [
    "dp=1", "dp=2", "dp=4,zero=3", "tp=4:1d-sp", "tp=8,dp=2", "pp=3:1f1b{layers=4/2/2},mb=3",
    "dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4", "dp=2,zero=1", "dp=4,zero=2/2", "dp=16,tp=4,zero=1", "dp=64,zero=3",
    "dp=8,tp=8,zero=3", "tp=8:1d-sp,pp=8,mb=8", "dp=32,pp=2,zero=2,mb=2", "dp=80,tp=8,zero=3", "dp=64,tp=4,pp=2,mb=2",
]  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


@cache
def owned(line: str, tied: bool = False) -> Ownership:
    layout = Layout.parse(line)
    run = example(layout).model_copy(update={"model": config.Model(**MODEL, tied=tied)})
    return ownership(make_model(run, layout), layout, shown(layout))


@cache
def picture(line: str) -> ET.Element:
    return ET.fromstring(layout_picture(owned(line)))


class Words(NamedTuple):
    """A text and the rectangle that it takes."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Words) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def words(drawn: ET.Element) -> list[Words]:
    found = []
    for one in drawn.iter(f"{SVG}text"):
        x, y, size = (float(one.attrib[key]) for key in ("x", "y", "font-size"))
        width = text_width(one.text or "", size, bold="font-weight" in one.attrib)
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor", "start")] * width
        ascent, descent = 0.75 * size, 0.2 * size
        if "transform" in one.attrib:
            along = left - x
            found.append(Words(one.text or "", x - ascent, y - along - width, x + descent, y - along))
        else:
            found.append(Words(one.text or "", left, y - ascent, left + width, y + descent))
    return found


def texts(drawn: ET.Element) -> list[str]:
    return [one.text for one in words(drawn)]


def rects(drawn: ET.Element, fill: str) -> list[tuple[float, float, float, float]]:
    return [
        tuple(float(one.attrib[key]) for key in ("x", "y", "width", "height"))  # type: ignore[misc]
        for one in drawn.iter(f"{SVG}rect")
        if one.get("fill") == fill and "x" in one.attrib
    ]


# ---- the whole


@pytest.mark.parametrize("line", LAYOUTS)
def test_no_text_meets_another_or_leaves_the_picture(line: str) -> None:
    drawn, found = picture(line), words(picture(line))
    assert len(found) > 20
    overlapping = [(one.text, other.text) for one, other in combinations(found, 2) if one.meets(other)]
    assert overlapping == []
    width, height = (float(drawn.attrib[key]) for key in ("width", "height"))
    assert [one.text for one in found if one.left < 0 or one.top < 0 or one.right > width or one.bottom > height] == []


@pytest.mark.parametrize("line", LAYOUTS)
def test_it_stands_alone_on_paper_of_its_own(line: str) -> None:
    source = layout_picture(owned(line))
    assert set(re.findall(r"url\((.*?)\)", source)) <= {"#hatch"}
    assert not re.search(r"@import|<style|<script|<image|href|font-face", source)
    assert re.findall(r"https?://[^\"]*", source) == ["http://www.w3.org/2000/svg"]
    drawn = picture(line)
    width, height = (float(drawn.attrib[key]) for key in ("width", "height"))
    assert rects(drawn, PAPER)[0] == (0, 0, width, height)
    assert drawn.attrib["aria-label"].endswith(f"under {Layout.parse(line)}")


@pytest.mark.parametrize("line", [line for line in LAYOUTS if Layout.parse(line).ranks <= 64])
def test_each_rank_and_what_it_holds_is_labelled(line: str) -> None:
    everything, shown_words = owned(line), set(texts(picture(line)))
    assert {str(rank) for rank in everything.ranks} <= shown_words
    unlabelled = {
        ranks_text(share.ranks)
        for stage in (0, len(everything.stages) - 1)
        for section in everything.sections(stage, "weight")
        for one in section.held
        for share in one.shares
    } - shown_words
    assert unlabelled == set()


def test_stages_units_and_weights_are_named() -> None:
    found = texts(picture("dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4"))
    for said in (
        "dp=2,tp=2:1d-sp,pp=2,zero=3,mb=4", "8 ranks, 410,688 weights", "zero=3", "which rank sits where",
        "ranks 0–3: embed, blocks 0–3, 46% of the cost", "each of blocks 0–3", "weights, gradients, optimizer states",
    ):  # fmt: skip
        assert said in found
    kinds = ["attn_norm", "attn.q", "attn.k", "attn.v", "attn.out", "ffn_norm", "ffn.gate", "ffn.up", "ffn.down"]
    assert [found.count(kind) for kind in (*kinds, "table", "out")] == [2] * len(kinds) + [1, 1]
    assert [said for said in found if said.startswith("stage ")] == ["stage 0", "stage 1"] * 2


def test_states_have_a_row_where_only_they_are_divided() -> None:
    found = texts(picture("dp=2,zero=1"))
    assert found.index("weights, gradients") < found.index("optimizer states")
    assert found.count("everything") == 4
    assert "gradients, optimizer states" in texts(picture("dp=4,zero=2/2"))
    assert "optimizer states" not in texts(picture("dp=4,zero=3"))


def test_alike_stages_are_drawn_once() -> None:
    found = texts(picture("tp=8:1d-sp,pp=8,mb=8"))
    assert "alike, each 11% of the cost: blocks 1–6; drawn is stage 1 on ranks 8–15" in found
    assert found.count("attn.q") == 3
    assert texts(picture("pp=3:1f1b{layers=4/2/2},mb=3")).count("attn.q") == 3


def test_of_more_than_64_ranks_one_replica_is_drawn() -> None:
    drawn = picture("dp=80,tp=8,zero=3")
    assert "which rank sits where: the first of 80 replicas" in texts(drawn)
    assert any("Hatched: held by other replicas." in text for text in texts(drawn))
    assert any("Every replica holds the same." in text for text in texts(picture("dp=64,tp=4,pp=2,mb=2")))
    assert not any("first of" in text or "Hatched" in text for text in texts(picture("dp=8,tp=8,zero=3")))


# ---- a panel


def drawn_boxes(shape: tuple[int, ...], shares: list[Share], line: str) -> dict[tuple[int, ...], list[Box]]:
    """The boxes that a panel shows, by the ranks whose colour they have, back in elements."""
    canvas, colours = Canvas(), Colours(owned(line))
    Panel("it", shape, shares, colours, 64).draw(canvas, 10, 20)
    drawn = ET.fromstring(canvas.document(900, 900, "a panel"))
    ((left, top, width, height),) = rects(drawn, "url(#hatch)")
    rows, columns = shape if len(shape) == 2 else (1, *shape)
    found = {}
    for share in shares:
        spans = [
            (((y - top) * rows / height, (y + h - top) * rows / height),
             ((x - left) * columns / width, (x + w - left) * columns / width))
            for x, y, w, h in rects(drawn, colours.of(share.ranks))
        ]  # fmt: skip
        boxes = [tuple((round(a), round(b)) for a, b in box) for box in spans]
        for box, exact in zip(boxes, spans, strict=True):
            for whole, part in zip(box, exact, strict=True):
                assert whole == pytest.approx(part, abs=0.02)
        found[share.ranks] = [box if len(shape) == 2 else box[1:] for box in boxes]
    return found


@pytest.mark.parametrize(
    "line", ["tp=4:1d-sp", "dp=4,zero=3", "dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4", "dp=8,tp=8,zero=3"]
)
def test_a_panel_shows_the_boxes_that_are_held(line: str) -> None:
    for one in owned(line).held:
        expected = {share.ranks: [tuple(box) for box in share.boxes] for share in one.shares}
        assert drawn_boxes(one.shape, list(one.shares), line) == expected


def test_what_is_not_there_stays_hatched() -> None:
    assert drawn_boxes((8, 8), [Share((1,), (((2, 4), (0, 8)),))], "dp=4,zero=3") == {(1,): [((2, 4), (0, 8))]}
    assert drawn_boxes((8, 8), [], "dp=4,zero=3") == {}


def test_of_labels_that_find_no_room_every_other_one_is_left_out() -> None:
    canvas, colours, rows = Canvas(), Colours(owned("dp=80,tp=8,zero=3")), 512
    shares = [Share((rank,), (((rank, rank + 1), (0, 64)),)) for rank in range(rows)]
    Panel("it", (rows, 64), shares, colours, 64).draw(canvas, 0, 0)
    found = [one for one in words(ET.fromstring(canvas.document(900, 900, "a panel"))) if one.text.isdigit()]
    assert [int(one.text) for one in found] == list(range(0, rows, 8))
    assert not any(one.meets(other) for one, other in combinations(found, 2))


# ---- colours and letters


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.1)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("line", LAYOUTS)
def test_ink_is_legible_on_every_colour(line: str) -> None:
    everything = owned(line)
    colours = Colours(everything)
    for ranks in {share.ranks for one in everything.held for share in (*one.shares, *one.states)}:
        contrast = (luminance(colours.of(ranks)) + 0.05) / (luminance(INK) + 0.05)
        assert contrast > 5, (ranks, colours.of(ranks))


@pytest.mark.parametrize("line", [line for line in LAYOUTS if Layout.parse(line).ranks <= 64])
def test_what_different_ranks_hold_of_a_tensor_differs_in_colour(line: str) -> None:
    colours = Colours(owned(line))
    for one in owned(line).held:
        for shares in (one.shares, one.states):
            assert len({colours.of(share.ranks) for share in shares}) == len(shares), one.weight


@pytest.mark.parametrize(
    ("colour", "expected"),
    [((1.0, 0.0, 0.0), "#ffffff"), ((0.0, 0.0, 0.0), "#000000"), ((0.62796, 0.25768, 29.234), "#ff0000"),
     ((0.86644, 0.29483, 142.495), "#00ff00"), ((0.45201, 0.31321, 264.052), "#0000ff")],
)  # fmt: skip
def test_oklch_is_what_it_is_defined_to_be(colour: tuple[float, float, float], expected: str) -> None:
    """The values of CSS Color 4."""
    found = [int(oklch(*colour)[at : at + 2], 16) for at in (1, 3, 5)]
    assert found == pytest.approx([int(expected[at : at + 2], 16) for at in (1, 3, 5)], abs=1)


# ---- where it goes


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4", "layout-dp2-tp2-1d-sp-pp2-zero3-mb4.svg"),
        ("pp=3:gpipe{layers=4/2/2},mb=3", "layout-pp3-gpipe-layers4-2-2-mb3.svg"),
        ("dp=1", "layout-dp1.svg"),
    ],
)
def test_the_file_is_named_after_the_layout(line: str, name: str) -> None:
    assert picture_path(Layout.parse(line), None) == Path("out") / name


def test_a_file_that_cannot_be_a_picture_is_refused(tmp_path: Path) -> None:
    assert picture_path(Layout(), tmp_path / "a.SVG") == tmp_path / "a.SVG"
    with pytest.raises(ConfigError, match=r"tp=2: is not the name of an SVG file; use tp=2\.svg"):
        picture_path(Layout(), Path("tp=2"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"FILE\.svg = .*a\.svg: cannot be written: File exists"):
        write_picture(owned("dp=1"), tmp_path / "file" / "a.svg")
    write_picture(owned("dp=1"), tmp_path / "new" / "a.svg")
    assert (tmp_path / "new" / "a.svg").read_text(encoding="utf-8") == layout_picture(owned("dp=1"))


def test_the_picture_of_the_documentation_is_what_the_command_draws() -> None:
    kept = Path(__file__).parents[2] / "docs" / "pictures" / "layout.svg"
    assert kept.read_text(encoding="utf-8") == layout_picture(owned("dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4"))
