"""The picture of a pipeline schedule, read back: every pass is where it happens, and all of it can be read."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.report.pipeline import PassTimes, Pipeline, pipeline
from shoal.report.pipeline_colours import DARK, LIGHT, WORDS, Theme, contrast, tone
from shoal.report.pipeline_picture import picture_path, pipeline_html, pipeline_svg, write_picture
from shoal.report.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
DOCUMENTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"), (4, 8)),
    **dict.fromkeys(("pipedream", "pipedream-vertical", "2bw"), (4, 4)),
    "1f1b-overlap": (4, 8, None, PassTimes(transfer=0.5)),
    "list": (4, 8, 2, PassTimes(1, 1.5, 0.5)),
}
LARGE = [(name, 8, 16, None) for name in ("1f1b", "interleaved", "zb-v", "dualpipe-v", "pipedream", "2bw")]
SIZES: list[tuple[Any, ...]] = [
    *LARGE,
    ("gpipe", 1, 1, None),
    ("interleaved", 4, 8, 4),
    ("list", 2, 5, 3),
    ("1f1b", 20, 100, None),
    ("pipedream", 4, 1),
    ("pipedream-vertical", 4, 2, None, PassTimes(transfer=0.5)),
]


class Drawn:
    """A picture's passes: by (lane, what pointing at it tells) their left edges and right edges, one a band."""

    def __init__(self, seen: Pipeline) -> None:
        self.source = pipeline_svg(seen)
        self.root = ET.fromstring(self.source)
        self.passes: dict[str, list[tuple[str, float, float]]] = {}
        for group in self.root.iter(f"{SVG}g"):
            if (title := group.find(f"{SVG}title")) is not None:
                rect = group.find(f"{SVG}rect")
                assert rect is not None
                left, width = float(rect.attrib["x"]), float(rect.attrib["width"])
                one = (group.attrib["class"], left, left + width)
                self.passes.setdefault(title.text or "", []).append(one)

    def lanes(self) -> list[tuple[float, float]]:
        """Left edge and right edge of every lane; the first group of that class is in the legend."""
        idle = [rect for group in self.root.iter(f"{SVG}g") if group.get("class") == "idle" for rect in group]
        lefts = [float(rect.attrib["x"]) for rect in idle]
        return [(x, x + float(rect.attrib["width"])) for x, rect in zip(lefts, idle, strict=True)][1:]


@pytest.fixture(params=SIZES, ids=lambda size: "-".join(map(str, size[:3])))
def seen(request: pytest.FixtureRequest) -> Pipeline:
    return pipeline(*request.param)


def test_every_pass_is_drawn_when_it_happens(seen: Pipeline) -> None:
    drawn = Drawn(seen)
    lanes = drawn.lanes()
    firsts = lanes[:: seen.ranks]
    assert len(lanes) == len(firsts) * seen.ranks
    unit = sum(right - left for left, right in firsts) / seen.end
    begins = [sum(right - left for left, right in firsts[:band]) / unit for band in range(len(firsts))]
    told = {bar.in_words(): bar for one in seen.bars for bar in one}
    assert len(drawn.passes) == sum(map(len, seen.bars))
    for title, parts in drawn.passes.items():
        bar = told[title.partition(", with weights")[0]]
        assert {css for css, *_ in parts} == {f"{bar.act.op.value}{bar.chunk}"}
        assert sum(right - left for _, left, right in parts) == pytest.approx((bar.stop - bar.start) * unit, abs=2.1)
        band = max(band for band, begin in enumerate(begins) if begin <= bar.start + 1e-6)
        assert parts[0][1] == pytest.approx(lanes[0][0] + (bar.start - begins[band]) * unit, abs=1)


def test_no_text_meets_another_or_leaves_the_picture(seen: Pipeline) -> None:
    root = Drawn(seen).root
    width, height = (float(root.attrib[key]) for key in ("width", "height"))
    boxes = []
    for one in root.iter(f"{SVG}text"):
        x, y, size = (float(one.attrib[key]) for key in ("x", "y", "font-size"))
        wide = text_width(one.text or "", size, bold="font-weight" in one.attrib)
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor", "start")] * wide
        boxes.append((one.text, left, y - 0.75 * size, left + wide, y + 0.1 * size))
    assert len(boxes) > 20
    assert [one for one in boxes if one[1] < 0 or one[2] < 0 or one[3] > width or one[4] > height] == []
    rows: dict[int, list[tuple[str | None, float, float, float, float]]] = {}
    for box in boxes:
        for row in {int(box[2] // 40), int(box[4] // 40)}:  # what meets is in the same one
            rows.setdefault(row, []).append(box)
    meeting = [
        (one[0], other[0])
        for row in rows.values()
        for one, other in combinations(row, 2)
        if one[1] < other[3] and other[1] < one[3] and one[2] < other[4] and other[2] < one[4]
    ]
    assert meeting == []


@pytest.mark.parametrize("size", LARGE, ids=lambda size: size[0])
def test_every_pass_of_eight_ranks_and_sixteen_micro_batches_has_its_number(
    size: tuple[str, int, int, int | None],
) -> None:
    seen = pipeline(*size)
    numbered = [
        texts[0].text
        for group in Drawn(seen).root.iter(f"{SVG}g")
        if group.find(f"{SVG}title") is not None and (texts := group.findall(f"{SVG}text"))
    ]
    assert sorted(map(str, numbered)) == sorted(str(bar.act.micro_batch) for one in seen.bars for bar in one)


def test_a_stream_shows_the_weights_that_a_pass_uses() -> None:
    seen = pipeline("pipedream", 4, 4)
    below = [
        texts[1].text
        for group in Drawn(seen).root.iter(f"{SVG}g")
        if group.find(f"{SVG}title") is not None and (texts := group.findall(f"{SVG}text"))
    ]
    assert sorted(map(str, below)) == sorted(str(bar.version) for one in seen.bars for bar in one)
    words = [one.text for one in Drawn(seen).root.iter(f"{SVG}text")]
    for said in ("step 0: begins", "step 1: steady", "step 2: steady", "drain", "versions"):
        assert said in words


def test_it_stands_alone_in_light_and_dark(seen: Pipeline) -> None:
    source = Drawn(seen).source
    assert not re.search(r"@import|<script|<image|href|font-face|url\(", source)
    light, dark = source.split("@media (prefers-color-scheme: dark)")
    for op, chunk in product(seen.ops, range(seen.chunks)):
        for part, theme in ((light, LIGHT), (dark.partition("</style>")[0], DARK)):
            assert f".{op.value}{chunk} rect{{fill:{tone(op, chunk, seen.chunks, theme).fill}}}" in part


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("chunks", range(1, 9))
def test_what_is_written_on_a_pass_can_be_read(theme: Theme, chunks: int) -> None:
    tones = [tone(op, chunk, chunks, theme) for op in WORDS for chunk in range(chunks)]
    assert min(contrast(*one) for one in tones) > 4.3
    assert len(set(tones)) == len(tones)
    assert contrast("#ffffff", "#000000") == pytest.approx(21)


def test_passes_of_any_times_are_drawn() -> None:
    drawn = Drawn(pipeline("zb-h1", 3, 4, times=PassTimes(1, 0.7, 0.0, 0.3)))
    assert {css for parts in drawn.passes.values() for css, *_ in parts} == {"F0", "I0"}


def test_a_page_has_the_picture_and_no_script() -> None:
    seen = pipeline("zb-v", 2, 4)
    page = pipeline_html(seen)
    assert pipeline_svg(seen) in page
    assert page.startswith("<!doctype html>")
    assert "<script" not in page
    assert page.count("<title>the forward pass of stage 0, micro-batch 3: ") == 1


def test_the_file_says_which_kind(tmp_path: Path) -> None:
    seen = pipeline("1f1b", 2, 2)
    for name, start in (("a.svg", "<svg"), ("deep/b.HTML", "<!doctype html>")):
        write_picture(seen, picture_path(tmp_path / name))
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    with pytest.raises(ConfigError, match=r"--picture = a.png: is not the name of an SVG or HTML file; use a.svg"):
        picture_path(Path("a.png"))
    with pytest.raises(ConfigError, match=r"cannot be written"):
        write_picture(seen, tmp_path / "a.svg" / "c.svg")


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_pictures_in_the_documentation_are_up_to_date(name: str) -> None:
    picture = pipeline_svg(pipeline(name, *DOCUMENTED[name]))
    assert (PICTURES / f"schedule-{name}.svg").read_text(encoding="utf-8") == picture
