"""Pictures of layouts, read back."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from functools import cache
from typing import NamedTuple

from shoal import config
from shoal.layout import Layout
from shoal.report.example import MODEL, example
from shoal.report.layout_picture import layout_picture
from shoal.report.ownership import Ownership, ownership, shown
from shoal.report.svg import text_width
from shoal.train.setup import make_model

LAYOUTS = [
    "dp=1", "dp=2", "dp=4,zero=3", "tp=4:1d-sp", "tp=8,dp=2", "pp=3:1f1b{layers=4/2/2},mb=3",
    "dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4", "dp=2,zero=1", "dp=4,zero=2/2", "dp=16,tp=4,zero=1", "dp=64,zero=3",
    "dp=8,tp=8,zero=3", "tp=8:1d-sp,pp=8,mb=8", "dp=32,pp=2,zero=2,mb=2", "dp=80,tp=8,zero=3", "dp=64,tp=4,pp=2,mb=2",
    "tp=4:2d", "tp=8:2.5d", "tp=8:3d", "tp=8:4x1x2", "tp=16:2d", "tp=8:1x8x1", "dp=2,tp=8:2.5d,zero=1",
    "dp=2,tp=8:3d,zero=2", "dp=2,tp=4:2d,pp=2,zero=3,mb=2", "dp=4,tp=16:2d,zero=3", "tp=32:2.5d/2,pp=2,mb=2",
    "dp=16,tp=8:2.5d,zero=1", "pp=2:zb-v,mb=4", "pp=2:zb-v,tp=2,mb=4", "dp=2,pp=2:interleaved/4,zero=3,mb=2",
    "pp=4:2bw,mb=4", "dp=2,pp=1:breadth-first/4", "dp=4,sync=server/2", "dp=64,tp=2,sync=server{stale=2;reduce=sum}",
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
