"""Which rank sits where, drawn: a field for each place of the pipeline, laid out as its grid of ranks is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from shoal.report.colours import Colours
from shoal.report.ownership import Ownership
from shoal.report.svg import MUTED, RIM, Canvas, text_width
from shoal.report.wording import stages_text

_CELL = (30, 22)
_LINE = 14
"""Pixels that a line of names takes."""
_ACROSS = 16
"""Replicas side by side."""
_GAP, _BELOW = 22, 10
"""Pixels between tables, and between their lines."""
_WIDEST = 860


class _Table(NamedTuple):
    """Ranks by two of their coordinates; ``ranks`` row by row. An axis without a name is not labelled."""

    title: str
    down: str
    across: str
    first: int
    """The coordinate of the first column."""
    ranks: Sequence[Sequence[int]]

    @property
    def left(self) -> float:
        return max(30.0, text_width(f"{self.down} 0", 8) + 6) if self.down else 0.0

    @property
    def top(self) -> int:
        return _LINE * (bool(self.title) + bool(self.across))

    @property
    def width(self) -> float:
        return self.left + max(len(self.ranks[0]) * _CELL[0], text_width(self.title, 9))

    @property
    def height(self) -> float:
        return self.top + len(self.ranks) * _CELL[1]

    def draw(self, canvas: Canvas, x: float, y: float, colours: Colours) -> None:
        wide, high = _CELL
        x, top = x + self.left, y + self.top
        if self.title:
            canvas.text(x, y + 9, self.title, 9, colour=MUTED)
        for (row, ranks), column in product(enumerate(self.ranks), range(len(self.ranks[0]))):
            left, upper = x + column * wide, top + row * high
            if row == 0 and self.across:
                words = f"{self.across} " * (column == 0) + str(self.first + column)
                canvas.text(left + wide / 2, top - 4, words, 8, colour=MUTED, anchor="middle")
            if column == 0 and self.down:
                words = f"{self.down} " * (row == 0) + str(row)
                canvas.text(left - 5, upper + 14, words, 8, colour=MUTED, anchor="end")
            canvas.rect(left, upper, wide - 2, high - 2, colours.of([ranks[column]]), rim=RIM, round_=3)
            canvas.text(left + wide / 2 - 1, upper + 14, str(ranks[column]), 10, anchor="middle")


class Field:
    """The ranks at one place of the pipeline.

    Of a tensor grid with several sides the last two are the rows and columns of a table; there is one for each place on
    the side before them and each replica. With fewer sides replicas are the columns, :data:`_ACROSS` in a table.
    """

    def __init__(self, owned: Ownership, place: int, colours: Colours) -> None:
        self._colours, self._title = colours, stages_text(owned.stages_at(place)) if len(owned.stages) > 1 else ""
        self._top = 16 if self._title else 2
        self._tables: list[tuple[float, float, _Table]] = []
        x, y, self.width, self.height = 0.0, float(self._top), 0.0, 0.0
        for table in _tables(owned, place):
            if x and x + table.width > _WIDEST:
                x, y = 0.0, self.height + _BELOW
            self._tables.append((x, y, table))
            self.width, self.height = max(self.width, x + table.width), y + table.height
            x += table.width + _GAP
        left = self._tables[0][2].left
        self.width = max(self.width, left + text_width(self._title, 10, bold=True))

    def draw(self, canvas: Canvas, x: float, y: float) -> None:
        if self._title:
            canvas.text(x + self._tables[0][2].left, y + 10, self._title, 10, bold=True)
        for right, down, table in self._tables:
            table.draw(canvas, x + right, y + down, self._colours)


def _tables(owned: Ownership, place: int) -> Iterator[_Table]:
    sides = [(axis, size) for axis, size in owned.layout.tensor_axes if size > 1]
    replicas = range(1 if owned.is_part else owned.replicas)

    def ranks(replica: int, fixed: Mapping[str, int], over: Sequence[str]) -> list[int]:
        dp, cp = divmod(replica, owned.layout.cp)
        corner = {**dict.fromkeys(owned.grid.names, 0), "pp": place, "dp": dp, "cp": cp, **fixed}
        return [owned.grid.rank(place) for place in owned.grid.vary(corner, over)]

    if len(sides) < 2:
        down = [axis for axis, _ in sides]
        for first in range(0, len(replicas), _ACROSS):
            columns = [ranks(replica, {}, down) for replica in replicas[first : first + _ACROSS]]
            yield _Table("", "".join(down), "·".join(_several(owned)), first, list(zip(*columns, strict=True)))
        return
    *outer, (row, _), (column, across) = sides
    for replica, *places in product(replicas, *(range(size) for _, size in outer)):
        fixed = {axis: at for (axis, _), at in zip(outer, places, strict=True)}
        at = dict(zip(("dp", "cp"), divmod(replica, owned.layout.cp), strict=True))
        named = {axis: at[axis] for axis in _several(owned)} | fixed
        title = ", ".join(f"{axis} {at}" for axis, at in named.items())
        cells = ranks(replica, fixed, (row, column))
        yield _Table(title, row, column, 0, [cells[at : at + across] for at in range(0, len(cells), across)])


def _several(owned: Ownership) -> list[str]:
    """The axes of replicas that have more than one place, where replicas are told apart."""
    sizes = {"dp": owned.layout.dp, "cp": owned.layout.cp}
    return [] if owned.is_part else [axis for axis, size in sizes.items() if size > 1]
