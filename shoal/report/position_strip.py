"""Which positions of a sample each rank of context parallelism has, drawn as a strip from the first to the last."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from shoal.context.zigzag import Division
from shoal.layout import Layout
from shoal.report.colours import hue
from shoal.report.svg import MUTED, RIM, Canvas, text_width

_HEIGHT = 26
_LEAST = 15
"""Pixels of a part that has room for a number."""


def strip(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """(place on the axis ``cp``, first, past the last) of each part of a sample, in order: positions counted in the
    smallest parts that there are."""
    division = Division(*layout.cp_grid)
    length = division.padded(1)
    owner = {place: rank for rank in range(layout.cp) for place in division.places(length, rank)}
    for rank, run in groupby(range(length), lambda place: owner[place]):
        places = list(run)
        yield rank, places[0], places[-1] + 1


def draw_positions(canvas: Canvas, layout: Layout, x: float, y: float, width: float) -> float:
    """Draw it from (x, y), ``width`` pixels wide; returns where the next thing goes."""
    title, parts = "which positions of a sample a rank has", list(strip(layout))
    key = "numbers and colours are places on cp; causal attention is the same work for all"
    canvas.text(x, y + 4, title, 12, bold=True)
    canvas.text(x + text_width(title, 12, bold=True) + 12, y + 4, key, 11, colour=MUTED)
    top, scale = y + 16, width / parts[-1][2]
    for rank, first, last in parts:
        canvas.rect(x + first * scale, top, (last - first) * scale, _HEIGHT, hue(rank, layout.cp), rim=RIM)
        if (last - first) * scale >= _LEAST:
            canvas.text(x + (first + last) / 2 * scale, top + 17, str(rank), 11, anchor="middle")
    canvas.text(x, top + _HEIGHT + 13, "first", 9, colour=MUTED)
    canvas.text(x + width, top + _HEIGHT + 13, "last", 9, colour=MUTED, anchor="end")
    return top + _HEIGHT + 30
