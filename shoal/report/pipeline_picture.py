"""A pipeline schedule as a picture, SVG or a page of HTML: a lane a rank, time from left to right, in bands if it is
long. Light or dark as its viewer is. Whoever points at a pass is told what it is and when."""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10
from pathlib import Path

from shoal.errors import ConfigError, setting
from shoal.report.pipeline import Bar, Pipeline, clock, percent
from shoal.report.pipeline_colours import DARK, LIGHT, WORDS, Theme, tone
from shoal.report.pipeline_words import by_rank, chunk_words, figures, headline, times_words
from shoal.report.svg import FAINT, FONT, INK, MUTED, PAPER, text_width, wrapped

_MARGIN, _NAME, _COLUMN, _GAP = 24, 58, 62, 4
"""Pixels: around the picture; the names of ranks; a column of numbers; between lanes."""
_LANE, _TALL, _LOW, _MANY = 26, 34, 18, 16
"""Pixels: a lane, one with two lines of numbers, and one of more ranks than so many."""
_LEAST, _MOST, _BANDS = 760, 1500, 4
"""Pixels: of the shortest band and of the longest; how many bands there are at most."""
_AIR = 3.5
"""Pixels beside a number in the narrowest pass."""
_SIZE, _SMALL = 11.5, 8.0
_SUFFIXES = (".svg", ".html")


def picture_path(asked: Path) -> Path:
    """``asked``. Raises :class:`~shoal.errors.ConfigError` for a name that is not that of a picture."""
    if asked.suffix.lower() not in _SUFFIXES:
        problem = "is not the name of an SVG or HTML file"
        legal = asked.parent / f"{asked.stem or 'schedule'}.svg"
        raise ConfigError(setting("--picture", asked, problem, f"use {legal}"))
    return asked


def write_picture(seen: Pipeline, path: Path) -> None:
    """Write the picture. Raises :class:`~shoal.errors.ConfigError` where ``path`` cannot be written."""
    made = pipeline_svg(seen) if path.suffix.lower() == ".svg" else pipeline_html(seen)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made, encoding="utf-8")
    except OSError as error:
        problem, legal = f"cannot be written: {error.strerror}", "name a file in a folder of yours"
        raise ConfigError(setting("--picture", path, problem, legal)) from None


def pipeline_html(seen: Pipeline) -> str:
    """A page with the picture, which scrolls where it is wider than the window."""
    style = (
        f"body{{margin:0;padding:1rem;background:{PAPER};overflow-x:auto}}"
        f"@media (prefers-color-scheme: dark){{body{{background:{_DARK_PAPER}}}}}"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(headline(seen))}</title>\n'
        f"<style>{style}</style>\n{pipeline_svg(seen)}</html>\n"
    )


def pipeline_svg(seen: Pipeline) -> str:
    """The picture as SVG."""
    return _Picture(seen).document()


class _Picture:
    def __init__(self, seen: Pipeline) -> None:
        self._seen = seen
        self._size = 10.0 if seen.chunks == 1 else 9.0
        self._lane = _TALL if seen.is_stream else _LANE if seen.ranks <= _MANY else _LOW
        self._heads = ["peak live"] + ["versions"] * seen.is_stream
        need = (text_width("0" * seen.digits, self._size) + _AIR) * seen.end / seen.shortest
        self._legible = need <= _BANDS * _MOST
        bands = ceil(need / _MOST) if self._legible else 1
        # Where one band ends and the next begins, few passes are divided.
        self._span = ceil(seen.end / bands / seen.shortest - 1e-9) * seen.shortest
        self._bands = ceil(seen.end / self._span - 1e-9)
        self._length = min(max(need * self._span / seen.end, _LEAST), _MOST)
        self._unit = self._length / self._span
        self._left = _MARGIN + _NAME
        self._right = self._left + self._length
        self._width = self._right + _COLUMN * len(self._heads) + _MARGIN
        self._shapes: list[str] = []

    def document(self) -> str:
        seen = self._seen
        self._text(_MARGIN, 42, headline(seen), 18, bold=True)
        self._text(_MARGIN, 63, times_words(seen), 12, muted=True)
        y = self._legend(92)
        for band in range(self._bands):
            y = self._band(band, y)
        y = self._figures(y + 6)
        label = escape(f"{headline(seen)}: {_gist(seen)}")
        size = f'viewBox="0 0 {_n(self._width)} {_n(y)}" width="{_n(self._width)}" height="{_n(y)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}" font-family="{FONT}">'
        paper = f'<rect class="paper" width="{_n(self._width)}" height="{_n(y)}" rx="10"/>'
        return "\n".join([head, f"<title>{label}</title>", _style(seen), paper, *self._shapes, "</svg>", ""])

    def _legend(self, y: float) -> float:
        seen, x = self._seen, float(_MARGIN)
        for op in seen.ops:
            for chunk in range(seen.chunks):
                self._swatch(x, y, f"{op.value}{chunk}")
                x += 16
            words = f"{op.value}  {WORDS[op]}"
            self._text(x + 4, y, words, _SIZE)
            x += text_width(words, _SIZE) + 26
        self._swatch(x, y, "idle")
        self._text(x + 20, y, "idle", _SIZE)
        notes = [*chunk_words(seen)]
        if self._legible:
            below = "; below them: how many updates the weights have had that the pass uses"
            notes.insert(0, "numbers are those of micro-batches" + below * seen.is_stream)
        self._text(_MARGIN, y + 21, "; ".join(notes), _SIZE, muted=True)
        return y + 38

    def _swatch(self, x: float, y: float, name: str) -> None:
        box = f'x="{_n(x)}" y="{_n(y - 11)}" width="14" height="14" rx="3"'
        self._shapes.append(f'<g class="{name}"><rect {box}/></g>')

    def _band(self, band: int, y: float) -> float:
        """Returns where the next thing goes."""
        seen = self._seen
        begin = band * self._span
        stop = min(begin + self._span, seen.end)
        length = (stop - begin) * self._unit
        for column, head in enumerate(self._heads):
            self._text(self._right + _COLUMN * (column + 1), y + 10, head, 10, muted=True, anchor="end")
        top = y + 16
        bottom = top + seen.ranks * (self._lane + _GAP) - _GAP
        for rank, peak in enumerate(seen.peaks):
            at = top + rank * (self._lane + _GAP)
            middle = at + self._lane / 2 + 4
            self._text(_MARGIN, middle, f"rank {rank}", _SIZE)
            box = f'x="{_n(self._left)}" y="{_n(at)}" width="{_n(length)}" height="{self._lane}"'
            self._shapes.append(f'<g class="idle"><rect {box}/></g>')
            values = [clock(peak), str(seen.weight_versions[rank])]
            for column, value in enumerate(values[: len(self._heads)]):
                self._text(self._right + _COLUMN * (column + 1), middle, value, _SIZE, anchor="end")
        for time, words in seen.marks:
            if begin <= time < stop:
                x = self._left + (time - begin) * self._unit
                self._shapes.append(f'<path class="mark" d="M{_n(x)} {_n(y + 1)}V{_n(bottom + 4)}"/>')
                self._text(x + 4, y + 10, words, 10, muted=True)
        for rank, bars in enumerate(seen.bars):
            for bar in bars:
                if bar.stop > begin and bar.start < stop:
                    self._bar(bar, begin, stop, top + rank * (self._lane + _GAP))
        return self._axis(begin, stop, bottom + 6)

    def _bar(self, bar: Bar, begin: float, end: float, y: float) -> None:
        """What of a pass is in a band. Of one that two bands divide, the longer part has the number, or the first."""
        start, stop = max(bar.start, begin), min(bar.stop, end)
        x, width = self._left + (start - begin) * self._unit, (stop - start) * self._unit
        if width <= 0:
            return
        numbered = stop - start > (bar.stop - bar.start) / 2 + 1e-9 * (-1 if start == bar.start else 1)
        gap = 1.0 if width >= 4 else -0.5  # too narrow to be told apart, and without a seam
        round_ = ' rx="2"' if gap > 0 else ' shape-rendering="crispEdges"'
        box = (
            f'x="{_n(x + max(gap, 0) / 2)}" y="{_n(y + 1)}" width="{_n(width - gap)}" height="{self._lane - 2}"{round_}'
        )
        number, middle = str(bar.act.micro_batch), x + width / 2
        texts = ""
        if numbered and text_width(number, self._size) + 1 <= width:
            baseline = y + (15 if self._seen.is_stream else self._lane / 2 + 0.36 * self._size)
            texts = _written(middle, baseline, self._size, number)
            version = str(bar.version)
            if self._seen.is_stream and text_width(version, _SMALL) <= width:
                texts += _written(middle, y + self._lane - 6, _SMALL, version, ' class="old"')
        title = escape(bar.in_words()) + (f", with weights after {bar.version} updates" if self._seen.is_stream else "")
        self._shapes.append(f'<g class="{bar.act.op.value}{bar.chunk}"><title>{title}</title><rect {box}/>{texts}</g>')

    def _axis(self, begin: float, stop: float, y: float) -> float:
        end = self._left + (stop - begin) * self._unit
        self._shapes.append(f'<path class="line" d="M{_n(self._left)} {_n(y)}H{_n(end)}"/>')
        step = _step(56 / self._unit)
        tick = ceil(begin / step - 1e-9) * step
        while tick <= stop + 1e-9 * step:
            x = self._left + (tick - begin) * self._unit
            self._shapes.append(f'<path class="line" d="M{_n(x)} {_n(y)}v4"/>')
            self._text(x, y + 16, clock(tick), 10, muted=True, anchor="middle")
            tick += step
        return y + 30

    def _figures(self, y: float) -> float:
        """In the picture's words, what it comes to; in two columns, names and what there is to say."""
        seen = self._seen
        lines = [*figures(seen)]
        left = _MARGIN + max(text_width(name, 12, bold=True) for name, _, _ in lines) + 14
        values = left + max(text_width(value, 12, bold=True) for _, value, _ in lines) + 14
        for name, value, what in lines:
            self._text(_MARGIN, y + 12, name, 12)
            self._text(left, y + 12, value, 12, bold=True)
            for line in wrapped(what, 12, self._width - _MARGIN - values):
                self._text(values, y + 12, line, 12, muted=True)
                y += 18
        return y + 14

    def _text(
        self, x: float, y: float, words: str, size: float, *, muted: bool = False, anchor: str = "", bold: bool = False
    ) -> None:
        style = ' class="muted"' * muted + (f' text-anchor="{anchor}"' if anchor else "") + ' font-weight="600"' * bold
        self._shapes.append(f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"{style}>{escape(words)}</text>')


_LANES = "#edf0f4"
_DARK_PAPER = "#0d1117"


def _style(seen: Pipeline) -> str:
    light = _rules(seen, LIGHT, PAPER, INK, MUTED, _LANES, FAINT)
    dark = _rules(seen, DARK, _DARK_PAPER, "#e6edf3", "#9aa5b1", "#1f2731", "#3d4753")
    return f"<style>\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n</style>"


def _rules(seen: Pipeline, theme: Theme, paper: str, ink: str, muted: str, lane: str, line: str) -> str:
    rules = [
        f"text{{fill:{ink}}} .muted{{fill:{muted}}} .paper{{fill:{paper}}} .idle rect{{fill:{lane}}}",
        f".old{{opacity:.8}} .line{{stroke:{line};fill:none}} .mark{{stroke:{muted};stroke-dasharray:3 3;fill:none}}",
    ]
    for op in seen.ops:
        for chunk in range(seen.chunks):
            fill, on = tone(op, chunk, seen.chunks, theme)
            name = f"{op.value}{chunk}"
            rules.append(f".{name} rect{{fill:{fill}}} .{name} text{{fill:{on}}}")
    return "\n".join(rules)


def _written(x: float, y: float, size: float, words: str, more: str = "") -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="middle"{more}>{words}</text>'


def _gist(seen: Pipeline) -> str:
    step = "a steady step takes" if seen.is_stream else "a step takes"
    return (
        f"{step} {clock(seen.makespan)}, {percent(seen.bubble_share)} of it bubble; "
        f"live activations {by_rank(seen.peaks)}; weight versions {by_rank(seen.weight_versions)}"
    )


def _step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is no less."""
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
