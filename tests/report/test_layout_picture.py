"""The picture of a layout, read back: what it shows is what is held, and all of it can be read."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import pytest
from layout_pictures import LAYOUTS, owned, picture, rects, texts, words

from shoal.errors import ConfigError
from shoal.layout import Layout
from shoal.placement import Box
from shoal.report.colours import Colours
from shoal.report.layout_picture import layout_picture, picture_path, write_picture
from shoal.report.ownership import Share
from shoal.report.panels import Panel
from shoal.report.svg import PAPER, Canvas
from shoal.report.wording import ranks_text

DOCUMENTED = {
    "layout": "dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4", "layout-2d": "tp=4:2d", "layout-2.5d": "tp=8:2.5d",
    "layout-3d": "tp=8:3d", "layout-1x2x2": "tp=4:1x2x2", "layout-zb-v": "pp=2:zb-v,mb=4",
    "layout-server": "dp=4,sync=server/2", "layout-cp": "cp=4", "layout-cp-2x2": "cp=4:2x2",
}  # fmt: skip


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
        for place in (0, everything.layout.pp - 1)
        for section in everything.sections(place, "weight")
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


def test_several_stages_of_a_rank_are_drawn_together() -> None:
    found = texts(picture("pp=2:zb-v,mb=4"))
    assert [said for said in found if said.startswith("stages ")] == ["stages 0, 3", "stages 1–2"] * 2
    assert "rank 0: embed, blocks 0–1, 6–7, head, 54% of the cost" in found
    assert "a colour for the stages of each rank" in found
    alike = texts(picture("pp=4:zb-v,mb=4"))
    assert [said for said in alike if said.startswith("stages ")][-2:] == ["stages 0, 7", "stages 1–6"]
    assert "alike, each 23% of the cost: blocks 1–6; drawn is stages 1, 6 on rank 1" in alike


def test_of_more_than_64_ranks_one_replica_is_drawn() -> None:
    drawn = picture("dp=80,tp=8,zero=3")
    assert "which rank sits where: the first of 80 replicas" in texts(drawn)
    assert any("Hatched: held by other replicas." in text for text in texts(drawn))
    assert any("Every replica holds the same." in text for text in texts(picture("dp=64,tp=4,pp=2,mb=2")))
    assert not any("first of" in text or "Hatched" in text for text in texts(picture("dp=8,tp=8,zero=3")))


# ---- the map of ranks


def seats(line: str) -> dict[int, tuple[float, float]]:
    """Where each rank is in the map: the middle of its number, the first one in the picture."""
    found: dict[int, tuple[float, float]] = {}
    ranks = {str(rank) for rank in range(Layout.parse(line).ranks)}
    for one in words(picture(line)):
        if one.text in ranks and one.bottom - one.top == pytest.approx(9.5):
            found.setdefault(int(one.text), ((one.left + one.right) / 2, one.bottom))
    return found


@pytest.mark.parametrize(
    ("line", "right", "down", "apart"),
    [
        ("tp=4:2d", 1, 2, 4), ("dp=4,tp=16:2d,zero=3", 1, 4, 16), ("tp=8:2.5d", 1, 2, 4), ("tp=8:3d", 1, 2, 4),
        ("dp=2,tp=8:2.5d,zero=1", 1, 2, 4), ("tp=8:4x1x2", 1, 2, 8), ("dp=2,tp=4:2d,pp=2,zero=3,mb=2", 1, 2, 4),
        ("tp=8,dp=2", 8, 1, 16),
    ],
)  # fmt: skip
def test_ranks_lie_as_on_their_grid(line: str, right: int, down: int, apart: int) -> None:
    """A rank's neighbours in its little field, and that fields are further from each other than cells are."""
    at, layout = seats(line), Layout.parse(line)
    assert sorted(at) == list(range(layout.ranks))
    (x, y), cell = at[0], at[right][0] - at[0][0]
    assert at[right] == (x + cell, y)
    assert cell > 0
    assert at[down] == (x, at[down][1])
    assert at[down][1] > y
    if apart < layout.ranks:
        assert at[apart][0] > at[apart - 1][0] + cell
        assert at[apart][1] == y


@pytest.mark.parametrize(
    ("line", "axes"),
    [
        ("tp=4:2d", {"row 0", "col 0"}), ("tp=8:2.5d", {"depth 0", "depth 1", "row 0", "col 0"}),
        ("tp=8:3d", {"a 0", "a 1", "b 0", "c 0"}), ("tp=8:4x1x2", {"a 0", "c 0"}), ("tp=8:1x8x1", {"b 0"}),
        ("dp=2,tp=8:2.5d,zero=1", {*(f"dp {dp}, depth {at}" for dp in (0, 1) for at in (0, 1)), "row 0", "col 0"}),
        ("tp=8,dp=2", {"tp 0", "dp 0"}),
    ],
)  # fmt: skip
def test_axes_are_named_where_they_have_more_than_one_place(line: str, axes: set[str]) -> None:
    assert {
        text for text in texts(picture(line)) if re.fullmatch(r"(, |(dp|tp|depth|row|col|a|b|c) \d)+", text)
    } == axes


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
    "line",
    ["tp=4:1d-sp", "dp=4,zero=3", "dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4", "dp=8,tp=8,zero=3", "tp=16:2d",
     "tp=8:2.5d", "dp=2,tp=8:3d,zero=2", "dp=2,tp=4:2d,pp=2,zero=3,mb=2"],
)  # fmt: skip
def test_a_panel_shows_the_boxes_that_are_held(line: str) -> None:
    for one in owned(line).held:
        expected = {share.ranks: [tuple(box) for box in share.boxes] for share in one.shares}
        assert drawn_boxes(one.shape, list(one.shares), line) == expected


def test_blocks_that_are_cut_both_ways_have_their_ranks_inside() -> None:
    """Nobody could tell whose the labels at the end of a row are."""
    everything = owned("dp=2,tp=8:2.5d,zero=1")
    colours = Colours(everything)
    for one in everything.held:
        canvas = Canvas()
        Panel("it", one.shape, one.shares, colours, 64).draw(canvas, 0, 0)
        drawn = ET.fromstring(canvas.document(900, 900, "a panel"))
        ((left, top, width, height),) = rects(drawn, "url(#hatch)")
        for share in one.shares:
            (label,) = [label for label in words(drawn) if label.text == ranks_text(share.ranks)]
            assert left <= label.left < label.right <= left + width, one.weight
            assert top <= label.top < label.bottom <= top + height, one.weight


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


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_pictures_of_the_documentation_are_what_the_command_draws(name: str) -> None:
    kept = Path(__file__).parents[2] / "docs" / "pictures" / f"{name}.svg"
    assert kept.read_text(encoding="utf-8") == layout_picture(owned(DOCUMENTED[name]))
