"""A step as it ran over its simulation as a picture, SVG or a page of HTML: two lanes a rank, on one clock, in bands if
it is long. Light or dark as its viewer is. Whoever points at an action is told what it is, when, and what it waited."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from statistics import quantiles

from shoal.errors import ConfigError, setting
from shoal.pipeline.program import PASSES
from shoal.report.overlay import Course, Overlay, Slice
from shoal.report.overlay_words import figures, headline, ms, waits, what_is_compared, what_it_is_of
from shoal.report.pipeline import percent
from shoal.report.pipeline_colours import DARK, LIGHT, WORDS, Theme, tone
from shoal.report.svg import FAINT, FONT, INK, MUTED, PAPER, text_width, wrapped

_MARGIN, _NAME, _TITLE, _COLUMN = 24, 58, 66, 62
"""Pixels: around the picture; the names of ranks, and of their lanes; a column of numbers."""
_RAN, _SIMULATED, _GAP = 26, 16, 10
"""Pixels: the lane of what ran and that of the simulation below it; between ranks."""
_LEAST, _MOST, _BANDS = 760, 1500, 4
"""Pixels: of the shortest band and of the longest; how many bands there are at most."""
_AIR = 3.5
"""Pixels beside a number in a short pass."""
_SIZE, _SMALL = 11.5, 10.0
_DARK_PAPER = "#0d1117"
_SUFFIXES = (".svg", ".html")


def picture_path(asked: Path) -> Path:
    """``asked``. Raises :class:`~shoal.errors.ConfigError` for a name that is not that of a picture."""
    if asked.suffix.lower() not in _SUFFIXES:
        legal = asked.parent / f"{asked.stem or 'report'}.svg"
        raise ConfigError(setting("--out", asked, "is not the name of an SVG or HTML file", f"use {legal}"))
    return asked


def write_picture(seen: Overlay, path: Path) -> None:
    """Write the picture. Raises :class:`~shoal.errors.ConfigError` where ``path`` cannot be written."""
    made = overlay_svg(seen) if path.suffix.lower() == ".svg" else overlay_html(seen)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made, encoding="utf-8")
    except OSError as error:
        problem, legal = f"cannot be written: {error.strerror}", "name a file in a folder of yours"
        raise ConfigError(setting("--out", path, problem, legal)) from None


def overlay_html(seen: Overlay) -> str:
    """A page with the picture, which scrolls where it is wider than the window."""
    style = (
        f"body{{margin:0;padding:1rem;background:{PAPER};overflow-x:auto}}"
        f"@media (prefers-color-scheme: dark){{body{{background:{_DARK_PAPER}}}}}"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(headline(seen))}</title>\n'
        f"<style>{style}</style>\n{overlay_svg(seen)}</html>\n"
    )


def overlay_svg(seen: Overlay) -> str:
    """The picture as SVG."""
    return _Picture(seen).document()


class _Picture:
    def __init__(self, seen: Overlay) -> None:
        self._seen = seen
        self._courses = (("measured", seen.measured, _RAN), ("simulated", seen.simulated, _SIMULATED))
        self._end = max(seen.measured.end, seen.simulated.end)
        need = _width_of_numbers(seen) * self._end / _short(seen)
        self._bands = min(ceil(need / _MOST), _BANDS)
        self._span = self._end / self._bands
        self._length = min(max(need / self._bands, _LEAST), _MOST)
        self._unit = self._length / self._span
        self._left = _MARGIN + _NAME + _TITLE
        self._right = self._left + self._length
        self._width = self._right + _COLUMN + _MARGIN
        self._shapes: list[str] = []

    def document(self) -> str:
        seen = self._seen
        self._text(_MARGIN, 42, headline(seen), 18, bold=True)
        self._text(_MARGIN, 63, what_it_is_of(seen), 12, muted=True)
        self._text(_MARGIN, 81, what_is_compared(seen), 12, muted=True)
        y = self._legend(110)
        for band in range(self._bands):
            y = self._band(band * self._span, y)
        y = self._waits(self._figures(y + 6))
        ran, simulated = ms(seen.measured.length), ms(seen.simulated.length)
        label = escape(f"{headline(seen)}: a step took {ran}, simulated {simulated}")
        size = f'viewBox="0 0 {_n(self._width)} {_n(y)}" width="{_n(self._width)}" height="{_n(y)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}" font-family="{FONT}">'
        paper = f'<rect class="paper" width="{_n(self._width)}" height="{_n(y)}" rx="10"/>'
        return "\n".join([head, f"<title>{label}</title>", _style(seen), paper, *self._shapes, "</svg>", ""])

    def _legend(self, y: float) -> float:
        seen, x = self._seen, float(_MARGIN)
        chunks = len(seen.stages[0])
        for op in seen.ops:
            x = self._swatches(x, y, [f"{op.value}{chunk}" for chunk in range(chunks)], f"{op.value}  {WORDS[op]}")
        x = self._swatches(x, y, ["rest"], "what is no pass")
        self._swatches(x, y, ["idle"], "idle")
        notes = ["numbers are those of micro-batches"]
        if seen.is_stream:
            notes.append("below zero: of the steps before")
        if chunks > 1:
            notes.append(f"a shade for each stage of a rank: on the first stages {', '.join(map(str, seen.stages[0]))}")
        self._text(_MARGIN, y + 21, "; ".join(notes), _SIZE, muted=True)
        return y + 38

    def _swatches(self, x: float, y: float, names: list[str], words: str) -> float:
        """Returns where the next thing goes."""
        for name in names:
            box = f'x="{_n(x)}" y="{_n(y - 11)}" width="14" height="14" rx="3"'
            self._shapes.append(f'<g class="{name}"><rect {box}/></g>')
            x += 16
        self._text(x + 4, y, words, _SIZE)
        return x + text_width(words, _SIZE) + 26

    def _band(self, begin: float, y: float) -> float:
        """Returns where the next thing goes."""
        self._text(self._right + _COLUMN, y + 10, "busy", _SMALL, muted=True, anchor="end")
        y += 16
        for place, rank in enumerate(self._seen.ranks):
            self._text(_MARGIN, y + _RAN / 2 + 4, f"rank {rank}", _SIZE)
            for title, course, height in self._courses:
                middle = y + height / 2 + 4
                self._text(_MARGIN + _NAME, middle, title, _SMALL, muted=True)
                self._text(self._right + _COLUMN, middle, percent(course.busy[place]), _SMALL, anchor="end")
                self._lane(course, place, begin, y, height)
                y += height + 1
            y += _GAP
        return self._axis(begin, y - 2)

    def _lane(self, course: Course, place: int, begin: float, y: float, height: float) -> None:
        end = min(begin + self._span, self._end)
        if (stop := min(end, max(course.length, course.lanes[place][-1].stop))) > begin:
            box = f'x="{_n(self._left)}" y="{_n(y)}" width="{_n((stop - begin) * self._unit)}" height="{_n(height)}"'
            self._shapes.append(f'<g class="idle"><rect {box}/></g>')
        for one in course.lanes[place]:
            if min(one.stop, end) > max(one.start, begin):
                self._slice(one, place, begin, end, y, height)

    def _slice(self, one: Slice, place: int, begin: float, end: float, y: float, height: float) -> None:
        """What of an action is in a band. Of one that two bands divide, the longer part has the number."""
        start, stop = max(one.start, begin), min(one.stop, end)
        x, width = self._left + (start - begin) * self._unit, (stop - start) * self._unit
        numbered = stop - start > (one.stop - one.start) / 2 + 1e-9 * (-1 if start == one.start else 1)
        gap = 1.0 if width >= 4 else -0.5  # too narrow to be told apart, and without a seam
        shape = ' rx="2"' if gap > 0 else ' shape-rendering="crispEdges"'
        box = (
            f'x="{_n(x + max(gap, 0) / 2)}" y="{_n(y + 1)}" width="{_n(width - gap)}" height="{_n(height - 2)}"{shape}'
        )
        name, number, text = "rest", str(one.act.micro_batch), ""
        if one.act.op in PASSES:
            name = f"{one.act.op.value}{self._seen.stages[place].index(one.act.stage)}"
            if numbered and text_width(number, _SMALL) + 1 <= width:
                at = f'x="{_n(x + width / 2)}" y="{_n(y + height / 2 + 0.36 * _SMALL)}"'
                text = f'<text {at} font-size="{_n(_SMALL)}" text-anchor="middle">{number}</text>'
        waited = f", after waiting {ms(one.waited)}" if one.waited else ""
        title = escape(f"{one.act.in_words()}: {ms(one.start)} to {ms(one.stop)}{waited}")
        self._shapes.append(f'<g class="{name}"><title>{title}</title><rect {box}/>{text}</g>')

    def _axis(self, begin: float, y: float) -> float:
        end = min(begin + self._span, self._end)
        right = self._left + (end - begin) * self._unit
        self._shapes.append(f'<path class="line" d="M{_n(self._left)} {_n(y)}H{_n(right)}"/>')
        step = _step(56 / self._unit)
        tick = ceil(begin / step - 1e-9) * step
        while tick <= end + 1e-9 * step:
            x = self._left + (tick - begin) * self._unit
            self._shapes.append(f'<path class="line" d="M{_n(x)} {_n(y)}v4"/>')
            self._text(x, y + 16, f"{round(tick, 9) + 0.0:,g}", _SMALL, muted=True, anchor="middle")
            tick += step
        self._text(self._right + _COLUMN, y + 16, "ms", _SMALL, muted=True, anchor="end")
        return y + 30

    def _figures(self, y: float) -> float:
        """In the picture's words, what it comes to, in columns; returns where the next thing goes."""
        rows = [("", "measured", "simulated", ""), *figures(self._seen)]
        lefts = [float(_MARGIN)]
        for column in range(3):
            widest = max(text_width(row[column], 12, bold=column > 0) for row in rows)
            lefts.append(lefts[-1] + widest + 18)
        for at, row in enumerate(rows):
            for column in range(3):
                head, bold = at == 0, at > 0 and column > 0
                self._text(lefts[column], y + 12, row[column], 12, muted=head, bold=bold)
            for line in wrapped(row[3], 12, self._width - _MARGIN - lefts[3]):
                self._text(lefts[3], y + 12, line, 12, muted=True)
                y += 18
        return y

    def _waits(self, y: float) -> float:
        for heading, found in waits(self._seen):
            self._text(_MARGIN, y + 20, heading, 12)
            y += 26
            for rank, act, measured, simulated in found:
                words = f"rank {rank}, for {act.in_words()}: {ms(measured)}, simulated {ms(simulated)}"
                self._text(_MARGIN, y + 12, words, 12, muted=True)
                y += 18
        return y + 14

    def _text(
        self, x: float, y: float, words: str, size: float, *, muted: bool = False, anchor: str = "", bold: bool = False
    ) -> None:
        if words:
            style = ' class="muted"' * muted + f' text-anchor="{anchor}"' * bool(anchor) + ' font-weight="600"' * bold
            self._shapes.append(f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"{style}>{escape(words)}</text>')


def _passes(seen: Overlay) -> Iterator[Slice]:
    return (
        one for course in (seen.measured, seen.simulated) for lane in course.lanes for one in lane
        if one.act.op in PASSES and one.stop > one.start
    )  # fmt: skip


def _width_of_numbers(seen: Overlay) -> float:
    return max(text_width(str(one.act.micro_batch), _SMALL) for one in _passes(seen)) + _AIR


def _short(seen: Overlay) -> float:
    """What a pass takes that is shorter than three in four: the shortest may have had nothing to do."""
    return quantiles((one.stop - one.start for one in _passes(seen)), n=4)[0]


def _style(seen: Overlay) -> str:
    light = _rules(seen, LIGHT, PAPER, INK, MUTED, "#edf0f4", "#a8b1bc", FAINT)
    dark = _rules(seen, DARK, _DARK_PAPER, "#e6edf3", "#9aa5b1", "#1f2731", "#6b7683", "#3d4753")
    return f"<style>\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n</style>"


def _rules(seen: Overlay, theme: Theme, paper: str, ink: str, muted: str, idle: str, rest: str, line: str) -> str:
    rules = [
        f"text{{fill:{ink}}} .muted{{fill:{muted}}} .paper{{fill:{paper}}} .line{{stroke:{line};fill:none}}",
        f".idle rect{{fill:{idle}}} .rest rect{{fill:{rest}}}",
    ]
    chunks = len(seen.stages[0])
    for op in seen.ops:
        for chunk in range(chunks):
            fill, on = tone(op, chunk, chunks, theme)
            rules.append(f".{op.value}{chunk} rect{{fill:{fill}}} .{op.value}{chunk} text{{fill:{on}}}")
    return "\n".join(rules)


def _step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is no less."""
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
