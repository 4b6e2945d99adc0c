"""What pictures of pipelines have in common: lanes of bars on one clock, in bands if they are long, as SVG or a page of
HTML. Light or dark as their viewer is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ConfigError, setting
from shoal.pipeline.program import Op
from shoal.report.pipeline_colours import DARK, LIGHT, Theme, tone
from shoal.report.svg import FAINT, FONT, INK, MUTED, PAPER, text_width

MARGIN, NAME, COLUMN = 24, 58, 62
"""Pixels: around the picture; the names of ranks; a column of numbers."""
LEAST, MOST, BANDS = 760, 1500, 4
"""Pixels: of the shortest band and of the longest; how many bands there are at most."""
AIR = 3.5
"""Pixels beside a number in the narrowest pass that has one."""
SIZE = 11.5
_SUFFIXES = (".svg", ".html")


class Skin(NamedTuple):
    """The colours of everything on a light paper or on a dark one."""

    theme: Theme
    paper: str
    ink: str
    muted: str
    idle: str
    rest: str
    line: str


_LIGHT = Skin(LIGHT, PAPER, INK, MUTED, "#edf0f4", "#a8b1bc", FAINT)
_DARK = Skin(DARK, "#0d1117", "#e6edf3", "#9aa5b1", "#1f2731", "#6b7683", "#3d4753")


class Part(NamedTuple):
    """What of a bar is in a band, in pixels; and whether it has the number, where two bands divide it: the longer part
    has, or the first."""

    x: float
    width: float
    numbered: bool


class Lanes:
    """Shapes, in the order in which they are drawn. What happens when a band begins is ``left`` pixels from the edge,
    and a unit of time is ``unit`` pixels."""

    def __init__(self, left: float, unit: float) -> None:
        self._left, self._unit = left, unit
        self._shapes: list[str] = []

    def text(
        self, x: float, y: float, words: str, size: float, *, muted: bool = False, anchor: str = "", bold: bool = False
    ) -> None:
        if words:
            style = ' class="muted"' * muted + f' text-anchor="{anchor}"' * bool(anchor) + ' font-weight="600"' * bold
            self._shapes.append(f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"{style}>{escape(words)}</text>')

    def swatches(self, x: float, y: float, names: Sequence[str], words: str) -> float:
        """What the classes ``names`` look like, and what they are. Returns where the next thing goes."""
        for name in names:
            self._shapes.append(f'<g class="{name}"><rect {_box(x, y - 11, 14, 14)} rx="3"/></g>')
            x += 16
        self.text(x + 4, y, words, SIZE)
        return x + text_width(words, SIZE) + 26

    def lane(self, y: float, length: float, height: float) -> None:
        """The ground on which bars lie."""
        self._shapes.append(f'<g class="idle"><rect {_box(self._left, y, length * self._unit, height)}/></g>')

    def part(self, start: float, stop: float, begin: float, end: float) -> Part:
        """Of a bar in the band from ``begin`` to ``end``."""
        first, last = max(start, begin), min(stop, end)
        numbered = last - first > (stop - start) / 2 + 1e-9 * (-1 if first == start else 1)
        return Part(self._left + (first - begin) * self._unit, (last - first) * self._unit, numbered)

    def bar(self, name: str, title: str, parts: Sequence[Part], y: float, height: float, texts: str = "") -> None:
        """An action of class ``name``, in the lane at ``y``; whoever points at it is told its ``title``."""
        boxes = "".join(f"<rect {_inside(part, y, height)}/>" for part in parts)
        self._shapes.append(f'<g class="{name}"><title>{escape(title)}</title>{boxes}{texts}</g>')

    def mark(self, time: float, begin: float, top: float, bottom: float, words: str, end: float) -> None:
        """A moment that concerns all lanes, in as many of its ``words`` as there is room for until ``end``."""
        x, room = self._left + (time - begin) * self._unit, (end - time) * self._unit - 8
        self._shapes.append(f'<path class="mark" d="M{_n(x)} {_n(top + 1)}V{_n(bottom)}"/>')
        shorter = (words, words.partition(":")[0], words.partition(":")[0].rpartition(" ")[2], "")
        self.text(x + 4, top + 10, next(each for each in shorter if text_width(each, 10) <= room), 10, muted=True)

    def axis(self, begin: float, end: float, y: float, label: Callable[[float], str]) -> float:
        """The clock of a band. Returns where the next thing goes."""
        right = self._left + (end - begin) * self._unit
        self._shapes.append(f'<path class="line" d="M{_n(self._left)} {_n(y)}H{_n(right)}"/>')
        step = _step(56 / self._unit)
        tick = ceil(begin / step - 1e-9) * step
        while tick <= end + 1e-9 * step:
            x = self._left + (tick - begin) * self._unit
            self._shapes.append(f'<path class="line" d="M{_n(x)} {_n(y)}v4"/>')
            self.text(x, y + 16, label(tick), 10, muted=True, anchor="middle")
            tick += step
        return y + 30

    def document(self, width: float, height: float, label: str, style: str) -> str:
        """The picture on paper of its own. ``label`` says what it shows."""
        size = f'viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}"'
        label = escape(label)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}" font-family="{FONT}">'
        paper = f'<rect class="paper" width="{_n(width)}" height="{_n(height)}" rx="10"/>'
        return "\n".join([head, f"<title>{label}</title>", style, paper, *self._shapes, "</svg>", ""])


def written(x: float, y: float, size: float, words: str, more: str = "") -> str:
    """What stands on a bar, around ``x``."""
    return f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="middle"{more}>{words}</text>'


def style(ops: Sequence[Op], chunks: int, more: Callable[[Skin], str]) -> str:
    """The rules of both skins, for passes of so many stages a rank, and ``more`` of what a picture has of its own."""
    light, dark = _rules(ops, chunks, _LIGHT, more), _rules(ops, chunks, _DARK, more)
    return f"<style>\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n</style>"


def _rules(ops: Sequence[Op], chunks: int, skin: Skin, more: Callable[[Skin], str]) -> str:
    rules = [
        f"text{{fill:{skin.ink}}} .muted{{fill:{skin.muted}}} .paper{{fill:{skin.paper}}} "
        f".idle rect{{fill:{skin.idle}}}",
        more(skin),
    ]
    for op in ops:
        for chunk in range(chunks):
            fill, on = tone(op, chunk, chunks, skin.theme)
            rules.append(f".{op.value}{chunk} rect{{fill:{fill}}} .{op.value}{chunk} text{{fill:{on}}}")
    return "\n".join(rules)


def page(svg: str, title: str) -> str:
    """A page of HTML with the picture, which scrolls where it is wider than the window."""
    style = (
        f"body{{margin:0;padding:1rem;background:{PAPER};overflow-x:auto}}"
        f"@media (prefers-color-scheme: dark){{body{{background:{_DARK.paper}}}}}"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{style}</style>\n{svg}</html>\n"
    )


def checked_path(asked: Path, option: str, stem: str) -> Path:
    """``asked``. Raises :class:`~shoal.errors.ConfigError`, which names ``option``, for a name that is not that of a
    picture."""
    if asked.suffix.lower() not in _SUFFIXES:
        legal = asked.parent / f"{asked.stem or stem}.svg"
        raise ConfigError(setting(option, asked, "is not the name of an SVG or HTML file", f"use {legal}"))
    return asked


def write(svg: str, title: str, path: Path, option: str) -> None:
    """Write the picture, as what the name says. Raises :class:`~shoal.errors.ConfigError`, which names ``option``,
    where ``path`` cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg if path.suffix.lower() == ".svg" else page(svg, title), encoding="utf-8")
    except OSError as error:
        problem, legal = f"cannot be written: {error.strerror}", "name a file in a folder of yours"
        raise ConfigError(setting(option, path, problem, legal)) from None


def _inside(part: Part, y: float, height: float) -> str:
    """A bar's place in its lane."""
    gap = 1.0 if part.width >= 4 else -0.5  # too narrow to be told apart, and without a seam
    shape = ' rx="2"' if gap > 0 else ' shape-rendering="crispEdges"'
    return _box(part.x + max(gap, 0) / 2, y + 1, part.width - gap, height - 2) + shape


def _step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is no less."""
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
