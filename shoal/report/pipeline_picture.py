"""A pipeline schedule as a picture: a lane a rank, time from left to right. Whoever points at a pass is told what it is
and when."""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from pathlib import Path

from shoal.report.lanes import (
    AIR,
    BANDS,
    COLUMN,
    LEAST,
    MARGIN,
    MOST,
    NAME,
    SIZE,
    Lanes,
    Skin,
    checked_path,
    page,
    style,
    write,
    written,
)
from shoal.report.pipeline import Bar, Pipeline, clock, percent
from shoal.report.pipeline_colours import WORDS
from shoal.report.pipeline_words import by_rank, chunk_words, figures, headline, times_words
from shoal.report.svg import text_width, wrapped

_GAP = 4
"""Pixels between lanes."""
_LANE, _TALL, _LOW, _MANY = 26, 34, 18, 16
"""Pixels: a lane, one with two lines of numbers, and one of more ranks than so many."""
_SMALL = 8.0


def picture_path(asked: Path) -> Path:
    """``asked``. Raises :class:`~shoal.errors.ConfigError` for a name that is not that of a picture."""
    return checked_path(asked, "--picture", "schedule")


def write_picture(seen: Pipeline, path: Path) -> None:
    """Write the picture. Raises :class:`~shoal.errors.ConfigError` where ``path`` cannot be written."""
    write(pipeline_svg(seen), headline(seen), path, "--picture")


def pipeline_html(seen: Pipeline) -> str:
    """A page with the picture."""
    return page(pipeline_svg(seen), headline(seen))


def pipeline_svg(seen: Pipeline) -> str:
    """The picture as SVG."""
    return _Picture(seen).document()


class _Picture:
    def __init__(self, seen: Pipeline) -> None:
        self._seen = seen
        self._size = 10.0 if seen.chunks == 1 else 9.0
        self._lane = _TALL if seen.is_stream else _LANE if seen.ranks <= _MANY else _LOW
        self._heads = ["peak live"] + ["versions"] * seen.is_stream
        need = (text_width("0" * seen.digits, self._size) + AIR) * seen.end / seen.shortest
        self._legible = need <= BANDS * MOST
        bands = ceil(need / MOST) if self._legible else 1
        # Where one band ends and the next begins, few passes are divided.
        self._span = ceil(seen.end / bands / seen.shortest - 1e-9) * seen.shortest
        self._bands = ceil(seen.end / self._span - 1e-9)
        length = min(max(need * self._span / seen.end, LEAST), MOST)
        left = MARGIN + NAME
        self._right = left + length
        self._width = self._right + COLUMN * len(self._heads) + MARGIN
        self._lanes = Lanes(left, length / self._span)

    def document(self) -> str:
        seen, lanes = self._seen, self._lanes
        lanes.text(MARGIN, 42, headline(seen), 18, bold=True)
        lanes.text(MARGIN, 63, times_words(seen), 12, muted=True)
        y = self._legend(92)
        for band in range(self._bands):
            y = self._band(band, y)
        y = self._figures(y + 6)
        rules = style(seen.ops, seen.chunks, _more)
        return lanes.document(self._width, y, f"{headline(seen)}: {_gist(seen)}", rules)

    def _legend(self, y: float) -> float:
        seen, x = self._seen, float(MARGIN)
        for op in seen.ops:
            names = [f"{op.value}{chunk}" for chunk in range(seen.chunks)]
            x = self._lanes.swatches(x, y, names, f"{op.value}  {WORDS[op]}")
        self._lanes.swatches(x, y, ["idle"], "idle")
        notes = [*chunk_words(seen)]
        if self._legible:
            below = "; below them: how many updates the weights have had that the pass uses"
            notes.insert(0, "numbers are those of micro-batches" + below * seen.is_stream)
        self._lanes.text(MARGIN, y + 21, "; ".join(notes), SIZE, muted=True)
        return y + 38

    def _band(self, band: int, y: float) -> float:
        """Returns where the next thing goes."""
        seen, lanes = self._seen, self._lanes
        begin = band * self._span
        stop = min(begin + self._span, seen.end)
        for column, head in enumerate(self._heads):
            lanes.text(self._right + COLUMN * (column + 1), y + 10, head, 10, muted=True, anchor="end")
        top = y + 16
        bottom = top + seen.ranks * (self._lane + _GAP) - _GAP
        for rank, peak in enumerate(seen.peaks):
            at = top + rank * (self._lane + _GAP)
            middle = at + self._lane / 2 + 4
            lanes.text(MARGIN, middle, f"rank {rank}", SIZE)
            lanes.lane(at, stop - begin, self._lane)
            values = [clock(peak), str(seen.weight_versions[rank])]
            for column, value in enumerate(values[: len(self._heads)]):
                lanes.text(self._right + COLUMN * (column + 1), middle, value, SIZE, anchor="end")
        marks = [(time, words) for time, words in seen.marks if begin <= time < stop]
        for (time, words), (end, _) in pairwise([*marks, (stop, "")]):
            lanes.mark(time, begin, y, bottom + 4, words, end)
        for rank, bars in enumerate(seen.bars):
            for bar in bars:
                if min(bar.stop, stop) > max(bar.start, begin):
                    self._bar(bar, begin, stop, top + rank * (self._lane + _GAP))
        return lanes.axis(begin, stop, bottom + 6, clock)

    def _bar(self, bar: Bar, begin: float, end: float, y: float) -> None:
        part = self._lanes.part(bar.start, bar.stop, begin, end)
        number, middle = str(bar.act.micro_batch), part.x + part.width / 2
        texts = ""
        if part.numbered and text_width(number, self._size) + 1 <= part.width:
            baseline = y + (15 if self._seen.is_stream else self._lane / 2 + 0.36 * self._size)
            texts = written(middle, baseline, self._size, number)
            version = str(bar.version)
            if self._seen.is_stream and text_width(version, _SMALL) <= part.width:
                texts += written(middle, y + self._lane - 6, _SMALL, version, ' class="old"')
        title = bar.in_words() + (f", with weights after {bar.version} updates" if self._seen.is_stream else "")
        self._lanes.bar(f"{bar.act.op.value}{bar.chunk}", title, [part], y, self._lane, texts)

    def _figures(self, y: float) -> float:
        """In the picture's words, what it comes to; in two columns, names and what there is to say."""
        lines = [*figures(self._seen)]
        left = MARGIN + max(text_width(name, 12, bold=True) for name, _, _ in lines) + 14
        values = left + max(text_width(value, 12, bold=True) for _, value, _ in lines) + 14
        for name, value, what in lines:
            self._lanes.text(MARGIN, y + 12, name, 12)
            self._lanes.text(left, y + 12, value, 12, bold=True)
            for line in wrapped(what, 12, self._width - MARGIN - values):
                self._lanes.text(values, y + 12, line, 12, muted=True)
                y += 18
        return y + 14


def _more(skin: Skin) -> str:
    return (
        f".old{{opacity:.8}} .line{{stroke:{skin.line};fill:none}} "
        f".mark{{stroke:{skin.muted};stroke-dasharray:3 3;fill:none}}"
    )


def _gist(seen: Pipeline) -> str:
    step = "a steady step takes" if seen.is_stream else "a step takes"
    return (
        f"{step} {clock(seen.makespan)}, {percent(seen.bubble_share)} of it bubble; "
        f"live activations {by_rank(seen.peaks)}; weight versions {by_rank(seen.weight_versions)}"
    )
