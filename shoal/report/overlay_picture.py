"""A step as it ran over its simulation as a picture: two lanes a rank, on one clock. Whoever points at an action is
told what it is, when, and what it waited."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from statistics import quantiles

from shoal.pipeline.program import PASSES
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
from shoal.report.overlay import Course, Overlay, Slice
from shoal.report.overlay_words import figures, headline, ms, waits, what_is_compared, what_it_is_of
from shoal.report.pipeline import percent
from shoal.report.pipeline_colours import WORDS
from shoal.report.svg import text_width, wrapped

_TITLE, _RAN, _SIMULATED, _GAP = 66, 26, 16, 10
"""Pixels: the names of lanes; the lane of what ran and that of the simulation below it; between ranks."""
_SMALL = 10.0


def picture_path(asked: Path) -> Path:
    """``asked``. Raises :class:`~shoal.errors.ConfigError` for a name that is not that of a picture."""
    return checked_path(asked, "--out", "report")


def write_picture(seen: Overlay, path: Path) -> None:
    """Write the picture. Raises :class:`~shoal.errors.ConfigError` where ``path`` cannot be written."""
    write(overlay_svg(seen), headline(seen), path, "--out")


def overlay_html(seen: Overlay) -> str:
    """A page with the picture."""
    return page(overlay_svg(seen), headline(seen))


def overlay_svg(seen: Overlay) -> str:
    """The picture as SVG."""
    return _Picture(seen).document()


class _Picture:
    def __init__(self, seen: Overlay) -> None:
        self._seen = seen
        self._courses = (("measured", seen.measured, _RAN), ("simulated", seen.simulated, _SIMULATED))
        self._end = max(seen.measured.end, seen.simulated.end)
        need = _width_of_numbers(seen) * self._end / _short(seen)
        self._bands = min(ceil(need / MOST), BANDS)
        self._span = self._end / self._bands
        length = min(max(need / self._bands, LEAST), MOST)
        left = MARGIN + NAME + _TITLE
        self._right = left + length
        self._width = self._right + COLUMN + MARGIN
        self._lanes = Lanes(left, length / self._span)

    def document(self) -> str:
        seen, lanes = self._seen, self._lanes
        lanes.text(MARGIN, 42, headline(seen), 18, bold=True)
        lanes.text(MARGIN, 63, what_it_is_of(seen), 12, muted=True)
        lanes.text(MARGIN, 81, what_is_compared(seen), 12, muted=True)
        y = self._legend(110)
        for band in range(self._bands):
            y = self._band(band * self._span, y)
        y = self._waits(self._figures(y + 6))
        ran, simulated = ms(seen.measured.length), ms(seen.simulated.length)
        label = f"{headline(seen)}: a step took {ran}, simulated {simulated}"
        return lanes.document(self._width, y, label, style(seen.ops, len(seen.stages[0]), _more))

    def _legend(self, y: float) -> float:
        seen, lanes, x = self._seen, self._lanes, float(MARGIN)
        chunks = len(seen.stages[0])
        for op in seen.ops:
            x = lanes.swatches(x, y, [f"{op.value}{chunk}" for chunk in range(chunks)], f"{op.value}  {WORDS[op]}")
        x = lanes.swatches(x, y, ["rest"], "what is no pass")
        lanes.swatches(x, y, ["idle"], "idle")
        notes = ["numbers are those of micro-batches"]
        if seen.is_stream:
            notes.append("below zero: of the steps before")
        if chunks > 1:
            notes.append(f"a shade for each stage of a rank: on the first stages {', '.join(map(str, seen.stages[0]))}")
        lanes.text(MARGIN, y + 21, "; ".join(notes), SIZE, muted=True)
        return y + 38

    def _band(self, begin: float, y: float) -> float:
        """Returns where the next thing goes."""
        lanes, end = self._lanes, min(begin + self._span, self._end)
        lanes.text(self._right + COLUMN, y + 10, "busy", _SMALL, muted=True, anchor="end")
        y += 16
        for place, rank in enumerate(self._seen.ranks):
            lanes.text(MARGIN, y + _RAN / 2 + 4, f"rank {rank}", SIZE)
            for title, course, height in self._courses:
                middle = y + height / 2 + 4
                lanes.text(MARGIN + NAME, middle, title, _SMALL, muted=True)
                lanes.text(self._right + COLUMN, middle, percent(course.busy[place]), _SMALL, anchor="end")
                self._lane(course, place, begin, end, y, height)
                y += height + 1
            y += _GAP
        lanes.text(self._right + COLUMN, y + 14, "ms", _SMALL, muted=True, anchor="end")
        return lanes.axis(begin, end, y - 2, lambda time: f"{round(time, 9) + 0.0:,g}")

    def _lane(self, course: Course, place: int, begin: float, end: float, y: float, height: float) -> None:
        if (stop := min(end, max(course.length, course.lanes[place][-1].stop))) > begin:
            self._lanes.lane(y, stop - begin, height)
        for one in course.lanes[place]:
            self._slice(one, place, begin, end, y, height)

    def _slice(self, one: Slice, place: int, begin: float, end: float, y: float, height: float) -> None:
        """What of an action is in a band, and what its rank did for it before it waited."""
        since = one.start - one.waited - one.before
        times = [(since, since + one.before), (one.start, one.stop)]
        parts = [self._lanes.part(*time, begin, end) for time in times if min(time[1], end) > max(time[0], begin)]
        if not parts:
            return
        last, name, number, text = self._lanes.part(*times[1], begin, end), "rest", str(one.act.micro_batch), ""
        if one.act.op in PASSES:
            name = f"{one.act.op.value}{self._seen.stages[place].index(one.act.stage)}"
            if last.numbered and text_width(number, _SMALL) + 1 <= last.width:
                text = written(last.x + last.width / 2, y + height / 2 + 0.36 * _SMALL, _SMALL, number)
        self._lanes.bar(name, _title(one), parts, y, height, text)

    def _figures(self, y: float) -> float:
        """In the picture's words, what it comes to, in columns; returns where the next thing goes."""
        rows = [("", "measured", "simulated", ""), *figures(self._seen)]
        lefts = [float(MARGIN)]
        for column in range(3):
            widest = max(text_width(row[column], 12, bold=column > 0) for row in rows)
            lefts.append(lefts[-1] + widest + 18)
        for at, row in enumerate(rows):
            for column in range(3):
                head, bold = at == 0, at > 0 and column > 0
                self._lanes.text(lefts[column], y + 12, row[column], 12, muted=head, bold=bold)
            for line in wrapped(row[3], 12, self._width - MARGIN - lefts[3]):
                self._lanes.text(lefts[3], y + 12, line, 12, muted=True)
                y += 18
        return y

    def _waits(self, y: float) -> float:
        for heading, found in waits(self._seen):
            self._lanes.text(MARGIN, y + 20, heading, 12)
            y += 26
            for rank, act, measured, simulated in found:
                words = f"rank {rank}, for {act.in_words()}: {ms(measured)}, simulated {ms(simulated)}"
                self._lanes.text(MARGIN, y + 12, words, 12, muted=True)
                y += 18
        return y + 14


def _title(one: Slice) -> str:
    before = f" and, before that, working {ms(one.before)}" if one.before else ""
    waited = f", after waiting {ms(one.waited)}{before}" if one.waited else ""
    return f"{one.act.in_words()}: {ms(one.start)} to {ms(one.stop)}{waited}"


def _passes(seen: Overlay) -> Iterator[Slice]:
    return (
        one for course in (seen.measured, seen.simulated) for lane in course.lanes for one in lane
        if one.act.op in PASSES and one.stop > one.start
    )  # fmt: skip


def _width_of_numbers(seen: Overlay) -> float:
    return max(text_width(str(one.act.micro_batch), _SMALL) for one in _passes(seen)) + AIR


def _short(seen: Overlay) -> float:
    """What a pass takes that is shorter than three in four: the shortest may have had nothing to do."""
    return quantiles((one.stop - one.start for one in _passes(seen)), n=4)[0]


def _more(skin: Skin) -> str:
    return f".line{{stroke:{skin.line};fill:none}} .rest rect{{fill:{skin.rest}}}"
