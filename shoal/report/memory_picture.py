"""What each rank of a step held, as a picture: a bar a phase, in the parts that it was for. Whoever points at a part is
told what it is and how much."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoal.memory.account import Memory, Moment
from shoal.purposes import HOST
from shoal.report.lanes import COLUMN, MARGIN, SIZE, Lanes, Part, checked_path, style, write, written
from shoal.report.memory_colours import css_name, host_name, rules
from shoal.report.memory_words import (
    HOST_WORDS,
    WORDS,
    has_host,
    headline,
    host_parts,
    host_title,
    parts,
    shown,
    title,
    unit_of,
    what_is_measured,
    what_it_is_of,
)
from shoal.report.svg import text_width

_BAR, _GAP, _LENGTH = 20, 12, 680
"""Pixels: the height of a bar; between ranks; the length of the longest bar, what is on the host included."""
_APART = 5
"""Pixels between what is on the device and what is on the host."""
_BESIDE = 16
"""Pixels between numbers and, beside them, those that have no room in the bar."""
_SMALL = 10.0


def picture_path(asked: Path) -> Path:
    """``asked``. Raises :class:`~shoal.errors.ConfigError` for a name that is not that of a picture."""
    return checked_path(asked, "--out", "memory")


def write_picture(memory: Memory, path: Path) -> None:
    """Write the picture. Raises :class:`~shoal.errors.ConfigError` where ``path`` cannot be written."""
    write(memory_svg(memory), headline(memory), path, "--out")


def memory_svg(memory: Memory) -> str:
    """The picture as SVG."""
    return _Picture(memory).document()


class _Picture:
    def __init__(self, memory: Memory) -> None:
        self._memory, self._shown, self._unit = memory, shown(memory), unit_of(memory)
        self._end = max(moment.total + moment.host for moment in memory.moments) / self._unit.size
        ranks = [memory.ranks[rank] for rank in self._shown]
        self._names = 16 + max(text_width(rank.name, SIZE, bold=True) for rank in ranks)
        phases = 12 + max(text_width(phase, _SMALL) for rank in ranks for phase in rank.phases)
        left = MARGIN + self._names + phases
        self._right = left + _LENGTH + _APART
        self._hosted = has_host(memory)
        self._scale = _LENGTH / self._end
        """Pixels of a unit."""
        self._numbers = self._right + COLUMN * (1 + self._hosted)
        beside = max(
            text_width(", ".join(f"{part} {self._unit.of(nbytes)}" for part, nbytes in self._unwritten(moment)), _SMALL)
            for rank in ranks
            for moment in rank.phases.values()
        )
        self._width = self._numbers + (_BESIDE + beside if beside else 0) + MARGIN
        self._lanes = Lanes(left, self._scale)

    def document(self) -> str:
        memory, lanes = self._memory, self._lanes
        lanes.text(MARGIN, 42, headline(memory), 18, bold=True)
        lanes.text(MARGIN, 63, what_it_is_of(memory, self._shown), 12, muted=True)
        lanes.text(MARGIN, 81, what_is_measured(), 12, muted=True)
        y = self._legend(110)
        lanes.text(self._right + COLUMN, y, self._unit.name, _SMALL, muted=True, anchor="end")
        if self._hosted:
            lanes.text(self._right + 2 * COLUMN, y, "host", _SMALL, muted=True, anchor="end")
        y += 6
        for rank in self._shown:
            y = self._rank(rank, y)
        end = self._end + self._hosted * _APART / self._scale
        y = lanes.axis(0, end, y - 4, lambda number: f"{round(number, 9):,g}")
        return lanes.document(self._width, y + 8, headline(memory), style((), 1, rules))

    def _legend(self, y: float) -> float:
        lanes, x = self._lanes, float(MARGIN)
        words = {css_name(part): words for part, words in WORDS.items() if self._has(part)}
        for name, meaning in (words | ({HOST: HOST_WORDS} if self._hosted else {})).items():
            if x > MARGIN and x + 20 + text_width(meaning, SIZE) > self._width - MARGIN:
                x, y = float(MARGIN), y + 20
            x = lanes.swatches(x, y, [name], meaning)
        return y + 28

    def _has(self, part: str) -> bool:
        return any(parts(moment)[part] for moment in self._memory.moments)

    def _rank(self, rank: int, y: float) -> float:
        """Returns where the next thing goes."""
        one = self._memory.ranks[rank]
        self._lanes.text(MARGIN, y + _BAR / 2 + 4, one.name, SIZE, bold=True)
        for phase, moment in one.phases.items():
            self._lanes.text(MARGIN + self._names, y + _BAR / 2 + 4, phase, _SMALL, muted=True)
            self._bar(one.name, phase, moment, y)
            y += _BAR + 1
        return y + _GAP

    def _bar(self, name: str, phase: str, moment: Moment, y: float) -> None:
        lanes, unit, start = self._lanes, self._unit, 0.0
        for part, nbytes in parts(moment).items():
            stop = start + nbytes / unit.size
            if (stop - start) * self._scale >= 0.5:
                box = lanes.part(start, stop, 0, self._end)
                self._part(css_name(part), title(name, phase, part, nbytes, moment, unit), box, nbytes, y)
            start = stop
        middle = y + _BAR / 2 + 4
        lanes.text(self._right + COLUMN, middle, unit.of(moment.total), _SMALL, anchor="end")
        for part, nbytes in host_parts(moment).items():
            stop = start + nbytes / unit.size
            if (stop - start) * self._scale >= 0.5:
                box = lanes.part(start, stop, 0, self._end)
                box = box._replace(x=box.x + _APART)
                self._part(host_name(part), host_title(name, phase, part, nbytes, moment, unit), box, nbytes, y)
            start = stop
        if moment.host:
            lanes.text(self._right + 2 * COLUMN, middle, unit.of(moment.host), _SMALL, anchor="end")
        words = ", ".join(f"{part} {unit.of(nbytes)}" for part, nbytes in self._unwritten(moment))
        lanes.text(self._numbers + _BESIDE, middle, words, _SMALL, muted=True)

    def _unwritten(self, moment: Moment) -> Iterator[tuple[str, int]]:
        """What has no room for its number."""
        for where, held in (("", parts(moment)), ("host ", host_parts(moment))):
            for part, nbytes in held.items():
                number = self._unit.of(nbytes)
                if not self._fits(number, nbytes / self._unit.size * self._scale) and float(number.replace(",", "")):
                    yield where + part, nbytes

    def _fits(self, number: str, width: float) -> bool:
        return text_width(number, _SMALL) + 6 <= width

    def _part(self, css: str, words: str, box: Part, nbytes: int, y: float) -> None:
        number = self._unit.of(nbytes)
        text = ""
        if self._fits(number, box.width):
            text = written(box.x + box.width / 2, y + _BAR / 2 + 0.36 * _SMALL, _SMALL, number)
        self._lanes.bar(css, words, [box], y, _BAR, text)
