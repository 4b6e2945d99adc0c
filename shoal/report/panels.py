"""One tensor as a rectangle, cut into the boxes that ranks hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from shoal.placement import Box
from shoal.report.colours import Colours
from shoal.report.ownership import Share
from shoal.report.svg import MUTED, PAPER, RIM, Canvas, text_width
from shoal.report.wording import ranks_text

_SIDE, _LEAST, _MOST, _STRIP = 84, 36, 144, 20
"""Pixels: the side of the model's most common size, the bounds of others, and the height of a vector."""
_TITLE = 32
_SIZES = (11, 10, 9, 8)
"""Font sizes of a label in its box: the first that fits."""
_LABEL, _LONGEST = 9.6, 700
"""Pixels: what the smallest label needs, and how long a side may become so that many boxes have it."""
_SLIVER = 0.6
"""A box is one that is thinner than so much of the median."""


class _Area(NamedTuple):
    """A rectangle, from its left upper corner."""

    x: float
    y: float
    width: float
    height: float

    def scaled(self, wide: float, high: float) -> _Area:
        return _Area(self.x * wide, self.y * high, self.width * wide, self.height * high)

    @property
    def thickness(self) -> float:
        return min(self.width, self.height)


class _Tick(NamedTuple):
    """A label beside a box whose middle is at ``place`` along a side, and the ``room`` that it needs there."""

    place: float
    words: str
    room: float


class Panel:
    """A tensor of ``shape``, a matrix or a vector, that ranks ``share``, with its ``title`` and shape above it.

    ``width`` and ``height`` are what it needs, in pixels. Sides grow with the square root of sizes, so that everything
    can be seen, and further where many ranks share one; ``common`` is the size that needs no growing. What is not there
    is hatched; ranks whose box is too narrow for a label have it outside.
    """

    def __init__(
        self, title: str, shape: Sequence[int], shares: Sequence[Share], colours: Colours, common: int
    ) -> None:
        self._title, self._shape = title, " × ".join(f"{n:,}" for n in shape)
        self._fills = [colours.of(share.ranks) for share in shares]
        words = [ranks_text(share.ranks) for share in shares]
        parts = [[_part(box, shape) for box in share.boxes] for share in shares]
        main = [max(those, key=lambda part: part.width * part.height) for those in parts]
        self._size = _size(shape, common, main, words)
        self._areas = [[part.scaled(*self._size) for part in those] for those in parts]
        self._touching = _touching([[_elements(box) for box in share.boxes] for share in shares])
        self._labels: list[tuple[float, float, str, int, bool]] = []
        beside, below = [], []
        for area, word in zip((part.scaled(*self._size) for part in main), words, strict=True):
            x, y = area.x + area.width / 2, area.y + area.height / 2
            if (fit := _fit(word, area)) is not None:
                self._labels.append((x, y, word, *fit))
            elif area.width >= area.height:
                beside.append(_Tick(y, word, _SIZES[-1] + 1.0))
            else:
                below.append(_Tick(x, word, text_width(word, _SIZES[-1]) + 3))
        self._beside, self._below = _spread(beside, self._size[1]), _spread(below, self._size[0])
        outside = max((text_width(tick.words, _SIZES[-1]) + 8 for tick, _ in self._beside), default=0.0)
        titles = max(text_width(self._title, 11, bold=True), text_width(self._shape, 10))
        self.width = max(self._size[0] + outside, titles)
        self.height = _TITLE + self._size[1] + (15 if self._below else 0)

    def draw(self, canvas: Canvas, x: float, y: float) -> None:
        """Draw it with its left upper corner at (x, y)."""
        canvas.text(x, y + 11, self._title, 11, bold=True)
        canvas.text(x, y + 25, self._shape, 10, colour=MUTED)
        y += _TITLE
        self._draw_boxes(canvas, x, y)
        for across, down, word, size, turned in self._labels:
            shift = 0.36 * size  # from the middle of a digit to its baseline
            at = (x + across + shift, y + down) if turned else (x + across, y + down + shift)
            canvas.text(*at, word, size, anchor="middle", turned=turned)
        right, bottom = x + self._size[0], y + self._size[1]
        for tick, down in self._beside:
            canvas.line(right, y + tick.place, right + 6, y + down, MUTED)
            canvas.text(right + 8, y + down + 2.9, tick.words, _SIZES[-1])
        for tick, across in self._below:
            canvas.line(x + tick.place, bottom, x + across, bottom + 5, MUTED)
            canvas.text(x + across, bottom + 13, tick.words, _SIZES[-1], anchor="middle")

    def _draw_boxes(self, canvas: Canvas, x: float, y: float) -> None:
        canvas.rect(x, y, *self._size, "url(#hatch)")
        for fill, areas in zip(self._fills, self._areas, strict=True):
            for area in areas:
                canvas.rect(x + area.x, y + area.y, area.width, area.height, fill)
        main = [max(area.thickness for area in areas) for areas in self._areas]
        line = min(1.0, 0.2 * min(main, default=0.0))
        for one, other, at, there in self._touching:
            for x1, y1, x2, y2 in _common_edge(self._areas[one][at], self._areas[other][there]):
                canvas.line(x + x1, y + y1, x + x2, y + y2, PAPER, line)
        canvas.rect(x, y, *self._size, "none", rim=RIM)


def _elements(box: Box) -> _Area:
    """A box in elements: columns run across, rows down."""
    (top, bottom), (left, right) = box if len(box) == 2 else ((0, 1), *box)
    return _Area(left, top, right - left, bottom - top)


def _part(box: Box, shape: Sequence[int]) -> _Area:
    """A box as parts of the tensor's sides."""
    rows, columns = shape if len(shape) == 2 else (1, *shape)
    x, y, width, height = _elements(box)
    return _Area(x / columns, y / rows, width / columns, height / rows)


def _touching(shares: Sequence[Sequence[_Area]]) -> list[tuple[int, int, int, int]]:
    """(share, other share, number of a box of the one, and of the other) where one begins at the row or column at which
    the other ends, in order."""
    begins: dict[tuple[str, float], list[tuple[int, int]]] = defaultdict(list)
    every = [(share, at, box) for share, boxes in enumerate(shares) for at, box in enumerate(boxes)]
    for share, at, box in every:
        begins["column", box.x].append((share, at))
        begins["row", box.y].append((share, at))
    found = set()
    for share, at, box in every:
        for other, there in (*begins["column", box.x + box.width], *begins["row", box.y + box.height]):
            if share != other:
                found.add((share, other, at, there) if share < other else (other, share, there, at))
    return sorted(found)


def _size(shape: Sequence[int], common: int, main: Sequence[_Area], words: Sequence[str]) -> tuple[float, float]:
    """(width, height) at which most shares, of which ``main`` are the largest boxes, have room for their words."""
    width = _side(shape[-1], common)
    height = _side(shape[0], common) if len(shape) == 2 else float(_STRIP)
    areas = [part.scaled(width, height) for part in main]
    if len(shape) == 2:
        flat = [area.height for area in areas if area.height <= area.width]
        upright = [area.width for area in areas if area.height > area.width]
        width *= _stretch(upright, [area.width for area in areas], width)
        height *= _stretch(flat, [area.height for area in areas], height)
        return width * _widening([part.scaled(width, height) for part in main], words, width, height), height
    if all(_fit(word, area) for word, area in zip(words, areas, strict=True)):
        return width, height
    turned = max(text_width(word, _SIZES[-1]) + 3 for word in words)
    widths = [area.width for area in areas]
    return width * _stretch(widths, widths, width), max(height, turned)


def _side(size: int, common: int) -> float:
    return float(min(max(_SIDE * (size / common) ** 0.5, _LEAST), _MOST))


def _stretch(thick: Sequence[float], every: Sequence[float], side: float) -> float:
    """By how much to lengthen a side so that boxes that are ``thick`` along it have room for a label: all but slivers
    among them, and those within reason, where they are slivers among ``every`` box."""
    if not thick:
        return 1.0
    least = min(each for each in thick if each >= _SLIVER * median(thick))
    most = _LONGEST / side if least >= _SLIVER * median(every) else 1.5
    return max(1.0, min(_LABEL / least, most))


def _widening(main: Sequence[_Area], words: Sequence[str], width: float, height: float) -> float:
    """By how much to lengthen rows so that boxes that are cut both ways have room for labels: of those in one row,
    nobody could tell apart labels at its end."""
    needs = [
        (text_width(word, _SIZES[-1]) + 3.1) / area.width
        for area, word in zip(main, words, strict=True)
        if max(area.width / width, area.height / height) < 1 and area.height >= _LABEL and _fit(word, area) is None
    ]
    return max(1.0, min(max(needs, default=1.0), _LONGEST / width))


def _fit(words: str, area: _Area) -> tuple[int, bool] | None:
    """(font size, whether turned) with which ``words`` fit."""
    upright = area.height > area.width
    for turned in (False, True) if upright else (False,):
        along, across = (area.height, area.width) if turned else (area.width, area.height)
        for size in _SIZES:
            if text_width(words, size) + 3 <= along and size + 1.5 <= across:
                return size, turned
    return None


def _spread(ticks: Sequence[_Tick], length: float) -> list[tuple[_Tick, float]]:
    """Where the labels of ``ticks`` stand along a side of that ``length``, each as near to its place as others allow;
    of too many every other one is left out."""
    ordered = sorted(ticks)
    while len(ordered) > 1 and sum(tick.room for tick in ordered) > length:
        ordered = ordered[::2]
    spots: list[float] = []
    end = 0.0
    for tick in ordered:
        spots.append(max(tick.place, end + tick.room / 2))
        end = spots[-1] + tick.room / 2
    end = length
    for at, tick in reversed(list(enumerate(ordered))):
        spots[at] = min(spots[at], end - tick.room / 2)
        end = spots[at] - tick.room / 2
    return list(zip(ordered, spots, strict=True))


def _common_edge(one: _Area, other: _Area) -> Iterator[tuple[float, float, float, float]]:
    left, right = max(one.x, other.x), min(one.x + one.width, other.x + other.width)
    upper, lower = max(one.y, other.y), min(one.y + one.height, other.y + other.height)
    near = 1e-6
    if abs(right - left) < near and lower - upper > near:
        yield left, upper, left, lower
    if abs(lower - upper) < near and right - left > near:
        yield left, upper, right, upper
