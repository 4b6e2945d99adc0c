"""The picture of a layout: which rank sits where, and the weights at each place of the pipeline, cut into what
its ranks hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from shoal.errors import ConfigError, setting
from shoal.layout import Layout
from shoal.report.colours import Colours
from shoal.report.ownership import KINDS, Kind, Ownership, Section, Share
from shoal.report.panels import Panel
from shoal.report.position_strip import draw_positions
from shoal.report.rank_map import Field
from shoal.report.svg import CARD, FAINT, MUTED, Canvas, fitting, text_width, wrapped
from shoal.report.where import NAMES
from shoal.report.wording import counted, few, keeps, meaning, ranks_text, section_text, stages_text, units_text
from shoal.sizes import size_text

_MARGIN, _PADDING, _GAP, _BETWEEN = 24, 18, 22, 40
"""Pixels: around the picture, inside a card, between panels, between kinds of layers and fields of ranks."""
_HEADING = 30
_LEAST_WIDTH = 860
_SECTIONS = 8
"""Kinds of layers at one place of the pipeline that are drawn: of more, the first ones and the last."""


def layout_picture(owned: Ownership) -> str:
    """The picture as SVG."""
    colours = Colours(owned)
    cards = [_Card(owned, places, colours) for places in _alike(owned)]
    inside = max(_LEAST_WIDTH, *(card.width for card in cards))
    canvas = Canvas()
    y = _head(canvas, owned, inside)
    y = _map(canvas, owned, colours, y, inside)
    if owned.layout.cp > 1:
        y = draw_positions(canvas, owned.layout, _MARGIN, y + 12, inside)
    for card in cards:
        y = card.draw(canvas, y, inside) + 16
    notes = "Numbers in boxes are the ranks that hold them. Sides grow with the square root of sizes."
    if owned.is_part:
        apart = owned.layout.zero or owned.layout.servers
        notes += " Hatched: held by other replicas." if apart else " Every replica holds the same."
    canvas.text(_MARGIN, y + 8, notes, 10, colour=MUTED)
    return canvas.document(inside + 2 * _MARGIN, y + 28, f"Who holds which block of each weight under {owned.layout}")


def picture_path(layout: Layout, asked: Path | None) -> Path:
    """Where a picture goes: the file ``asked`` for, else one below ``out`` that is named after the layout.

    Raises :class:`~shoal.errors.ConfigError` for a name that is not that of a picture.
    """
    if asked is None:
        return Path("out") / f"layout-{re.sub(r'[^a-z0-9.]+', '-', str(layout).replace('=', '')).strip('-')}.svg"
    if asked.suffix.lower() != ".svg":
        raise ConfigError(setting("FILE.svg", asked, "is not the name of an SVG file", f"use {asked}.svg"))
    return asked


def write_picture(owned: Ownership, path: Path) -> None:
    """Write the picture. Raises :class:`~shoal.errors.ConfigError` where ``path`` cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(layout_picture(owned), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            setting("FILE.svg", path, f"cannot be written: {error.strerror}", "name a file in a folder of yours")
        ) from None


def _head(canvas: Canvas, owned: Ownership, inside: float) -> float:
    """The layout and what it means; returns where the next thing goes."""
    layout, title = owned.layout, str(owned.layout)
    canvas.text(_MARGIN, 44, title, fitting(title, 20, inside), bold=True)
    about = f"{counted(layout.ranks, 'rank')}, {owned.elements:,} weights"
    if layout.offload:
        most = {name: max(there.get(place, 0) for there in owned.bytes.values()) for place, name in NAMES.items()}
        kept = ", ".join(f"{size_text(size)} {name}" for name, size in most.items() if size)
        about += f"; of model states a rank keeps at most {kept}"
    canvas.text(_MARGIN, 66, about, 12, colour=MUTED)
    y, indent = 92.0, 24 + max(text_width(key, 12, bold=True) for key, _, _ in meaning(layout))
    for key, what, _ in meaning(layout):
        canvas.text(_MARGIN, y, key, 12, bold=True)
        for line in wrapped(what, 12, inside - indent):
            canvas.text(_MARGIN + indent, y, line, 12)
            y += 18
    return y + 8


def _map(canvas: Canvas, owned: Ownership, colours: Colours, y: float, inside: float) -> float:
    """Which rank sits where, a field for each place of the pipeline; returns where the next thing goes."""
    title = "which rank sits where" + (f": the first of {owned.replicas} replicas" if owned.is_part else "")
    canvas.text(_MARGIN, y + 4, title, 12, bold=True)
    canvas.text(_MARGIN + text_width(title, 12, bold=True) + 12, y + 4, colours.key(), 11, colour=MUTED)
    fields = [Field(owned, place, colours) for place in range(owned.layout.pp)]
    width, height = max(field.width for field in fields) + _BETWEEN, fields[0].height + 12
    a_line = max(1, int((inside + _BETWEEN) // width))
    for place, field in enumerate(fields):
        field.draw(canvas, _MARGIN + place % a_line * width, y + 18 + place // a_line * height)
    return y + 24 + -(-len(fields) // a_line) * height


class _Block:
    """Layers that are held alike, drawn once; panels stand below each other where there is room.

    Where the same ranks have all of their states between them, a single box says so.
    """

    def __init__(self, owned: Ownership, section: Section, kind: Kind, colours: Colours) -> None:
        self.heading, common = section_text(section, owned.units), owned.common_size
        if kind == "state" and (ranks := section.updaters):
            size = sum(one.numel for one in section.held)
            panels = [Panel("everything", (size,), [Share(ranks, (((0, size),),))], colours, common)]
        else:
            panels = [Panel(one.label, one.shape, one.of(kind), colours, common) for one in section.held]
        self.columns: list[list[Panel]] = []
        room = max(panel.height for panel in panels) + min(panel.height for panel in panels) + 8
        for panel in panels:
            if self.columns and sum(each.height + 8 for each in self.columns[-1]) + panel.height <= room:
                self.columns[-1].append(panel)
            else:
                self.columns.append([panel])
        self._widths = [max(panel.width for panel in column) for column in self.columns]
        self.width = max(sum(self._widths) + _GAP * (len(self._widths) - 1), text_width(self.heading, 11))
        self.height = _HEADING + max(sum(panel.height + 8 for panel in column) - 8 for column in self.columns)

    def draw(self, canvas: Canvas, x: float, y: float) -> None:
        canvas.text(x, y + 11, self.heading, 11, colour=MUTED)
        canvas.line(x, y + 17, x + self.width, y + 17, FAINT)
        for column, width in zip(self.columns, self._widths, strict=True):
            top = y + _HEADING
            for panel in column:
                panel.draw(canvas, x, top)
                top += panel.height + 8
            x += width + _GAP


class _Row:
    """Blocks side by side, in as many lines as they need, below what they are of."""

    def __init__(self, label: str, blocks: Sequence[_Block], rest: str = "") -> None:
        self._label, self._blocks, self._rest = label, blocks, rest

    @property
    def width(self) -> float:
        """What one line takes."""
        return sum(block.width for block in self._blocks) + _BETWEEN * (len(self._blocks) - 1)

    def draw(self, canvas: Canvas, x: float, y: float, inside: float) -> float:
        """Returns where the next row goes."""
        canvas.text(x, y + 12, self._label, 12, bold=True)
        y += 24
        for blocks in self._lines(inside):
            left = x
            for block in blocks:
                block.draw(canvas, left, y)
                left += block.width + _BETWEEN
            y += max(block.height for block in blocks) + 16
        if self._rest:
            canvas.text(x, y + 6, self._rest, 11, colour=MUTED)
            y += 20
        return y + 4

    def _lines(self, inside: float) -> Iterator[list[_Block]]:
        line: list[_Block] = []
        taken = 0.0
        for block in self._blocks:
            if line and taken + block.width > inside:
                yield line
                line, taken = [], 0.0
            line.append(block)
            taken += block.width + _BETWEEN
        yield line


class _Card:
    """The first of ``places`` on the pipeline, which are alike but for their ranks."""

    def __init__(self, owned: Ownership, places: Sequence[int], colours: Colours) -> None:
        self._title, self._about = _about(owned, places)
        self._rows = []
        for kind, label in zip(KINDS, keeps(owned.layout), strict=False):
            sections = owned.sections(places[0], kind)
            blocks = [_Block(owned, section, kind, colours) for section in few(sections, _SECTIONS)]
            more = len(sections) - len(blocks)
            rest = f"not drawn: {more} more before the last, divided elsewhere" if more else ""
            self._rows.append(_Row(label, blocks, rest))

    @property
    def width(self) -> float:
        return self._rows[0].width + 2 * _PADDING

    def draw(self, canvas: Canvas, y: float, inside: float) -> float:
        """Returns where the card ends."""
        shapes = Canvas()
        bottom = y + 44
        for row in self._rows:
            bottom = row.draw(shapes, _MARGIN + _PADDING, bottom, inside - 2 * _PADDING)
        canvas.rect(_MARGIN, y, inside, bottom - y, CARD, rim=FAINT, round_=8)
        canvas.text(_MARGIN + _PADDING, y + 28, self._title, 14, bold=True)
        after = _MARGIN + _PADDING + text_width(self._title, 14, bold=True) + 12
        room = inside + _MARGIN - _PADDING - after
        canvas.text(after, y + 28, self._about, fitting(self._about, 12, room), colour=MUTED)
        canvas.add(shapes)
        return bottom


def _about(owned: Ownership, places: Sequence[int]) -> tuple[str, str]:
    ranks = owned.ranks_at(places[0])
    every_unit = sorted(unit for place in places for unit in owned.units_at(place))
    units = units_text([owned.units[unit] for unit in every_unit])
    who = f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"
    if len(owned.stages) == 1:
        return who, units
    share = f"{owned.cost_share(places[0]):.0%} of the cost"
    drawn = stages_text(owned.stages_at(places[0]))
    if len(places) == 1:
        return drawn, f"{who}: {units}, {share}"
    every = stages_text(sorted(stage for place in places for stage in owned.stages_at(place)))
    return every, f"alike, each {share}: {units}; drawn is {drawn} on {who}"


def _alike(owned: Ownership) -> Iterator[list[int]]:
    """The places, each alone; but three or more in a row that differ in nothing but their numbers together."""

    def shape(place: int) -> object:
        first = min(owned.ranks_at(place))

        def shifted(shares: Sequence[Share]) -> list[object]:
            return [(tuple(rank - first for rank in share.ranks), share.boxes) for share in shares]

        return [
            (
                len(section.units),
                [(one.label, one.shape, shifted(one.shares), shifted(one.states)) for one in section.held],
            )
            for section in owned.sections(place, "state")
        ]

    for _, run in groupby(range(owned.layout.pp), shape):
        places = list(run)
        yield from [places] if len(places) > 2 else ([place] for place in places)
