"""A layout for people: what it means, which rank sits where, and who holds which part of each weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from shoal.report.ownership import KINDS, Kind, Ownership, Share
from shoal.report.where import NAMES
from shoal.report.wording import (
    counted,
    few,
    keeps,
    meaning,
    ranks_text,
    section_text,
    share_text,
    span_text,
    stages_text,
    units_text,
)
from shoal.sizes import size_text

_SHARES, _SECTIONS = 8, 8
"""Holders of one tensor, and kinds of layers at one place of the pipeline, that are listed: of more, the first ones and
the last."""
_FIELDS = 8
"""Fields of a tensor grid side by side."""


def layout_report(owned: Ownership) -> RenderableType:
    """Everything that ``shoal layout`` prints."""
    parts = [*_meaning(owned), *_seats(owned)]
    if len(owned.stages) > 1:
        parts += ["", "[bold]where it is cut[/]", _indented(escape(_cut(owned)))]
    parts += _kept(owned)
    for place in range(owned.layout.pp):
        parts += _place(owned, place)
    return Group(*parts)


def _meaning(owned: Ownership) -> Iterator[RenderableType]:
    yield f"[bold]{escape(str(owned.layout))}[/] on {counted(owned.layout.ranks, 'rank')}"
    table = _table()
    for key, what, cost in meaning(owned.layout):
        table.add_row(f"[bold]{escape(key)}[/]", escape(what) + (f"\n[dim]{escape(cost)}[/]" if cost else ""))
    yield _indented(table)


def _seats(owned: Ownership) -> Iterator[RenderableType]:
    """The ranks by their coordinates: the fastest axis from left to right, the others downwards; but the first side of
    a tensor grid with three has fields side by side."""
    places = [owned.grid.coords(rank) for rank in owned.ranks]
    sizes = {axis: size for axis in owned.grid.names if (size := len({place[axis] for place in places})) > 1}
    *down, across = sizes or {"dp": 1}
    sides = [axis for axis in owned.layout.tensor_names if axis in sizes]
    apart = sides[0] if len(sides) == 3 and sizes[sides[0]] <= _FIELDS else ""
    down = [axis for axis in down if axis != apart]
    head = f"{across} 0 → {places[-1][across]}"
    table = _table(*down, *([f"{apart} {at}: {head}" for at in range(sizes[apart])] if apart else [head]))
    width = len(str(owned.ranks[-1]))
    rows: dict[tuple[int, ...], dict[int, list[str]]] = {}
    for rank, place in zip(owned.ranks, places, strict=True):
        fields = rows.setdefault(tuple(place[axis] for axis in down), {})
        fields.setdefault(place.get(apart, 0), []).append(f"{rank:>{width}}")
    for row, fields in rows.items():
        table.add_row(*map(str, row), *map("  ".join, fields.values()))
    yield ""
    yield "[bold]which rank sits where[/]" + (f": the first of {owned.replicas} replicas" if owned.is_part else "")
    yield _indented(table)


def _kept(owned: Ownership) -> Iterator[RenderableType]:
    """What each rank keeps of model states, by place; ranks that keep as much together."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, there in owned.bytes.items():
        alike.setdefault(tuple(there.get(place, 0) for place in NAMES), []).append(rank)
    table = _table()
    for sizes, ranks in few(list(alike.items()), _SHARES):
        words = [f"{size_text(size)} {name}" if size else "" for size, name in zip(sizes, NAMES.values(), strict=True)]
        table.add_row(f"rank{'s' * (len(ranks) > 1)} [bold]{ranks_text(ranks)}[/]", *words)
    yield ""
    yield "[bold]what a rank keeps[/]: parameters, gradients, masters and optimizer states"
    yield _indented(table)


def _cut(owned: Ownership) -> str:
    """Why the stages are what they are."""
    by_cost = groupby(zip(owned.costs, owned.units, strict=True), lambda each: each[0])
    named = [(cost, [name for _, name in run]) for cost, run in by_cost]
    costs = ", ".join(f"{units_text(names)} {cost:,}" + " each" * (len(names) > 1) for cost, names in named)
    chosen = owned.layout.stage_layers
    why = (
        "so that the largest share, which sets the pace, is as small as it can be"
        if chosen is None
        else f"as layers={'/'.join(map(str, chosen))} says"
    )
    return f"A layer costs what its matrices have: {costs}. Stages are cut {why}."


def _place(owned: Ownership, place: int) -> Iterator[RenderableType]:
    names, ranks = units_text([owned.units[unit] for unit in owned.units_at(place)]), owned.ranks_at(place)
    yield ""
    if len(owned.stages) > 1:
        who = f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"
        what = stages_text(owned.stages_at(place))
        yield f"[bold]{what}[/] on {who}: {escape(names)}, {owned.cost_share(place):.0%} of the cost"
    else:
        yield f"[bold]who holds what[/]: {escape(names)}"
    for kind, title in zip(KINDS, keeps(owned.layout), strict=False):
        counts = [owned.count(rank, kind) for rank in ranks]
        spread = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
        yield _indented(f"[dim]{title}; a rank has {spread} of {owned.elements:,}[/]")
        yield _indented(_holdings(owned, place, kind))


def _holdings(owned: Ownership, place: int, kind: Kind) -> RenderableType:
    """Who holds what of each weight, layers in a row together where they are held alike."""
    table = _table()
    sections = owned.sections(place, kind)
    for section in few(sections, _SECTIONS):
        name = section_text(section, owned.units)
        if kind == "state" and (updaters := section.updaters):
            table.add_row(f"[italic]{escape(name)}[/]", "", f"[bold]{ranks_text(updaters)}[/]: everything")
            continue
        table.add_row(f"[italic]{escape(name)}[/]")
        for one in section.held:
            table.add_row(f"  {escape(one.label)}", " × ".join(map(str, one.shape)), _holders(one.of(kind), one.shape))
    if len(sections) > _SECTIONS:
        more = len(sections) - _SECTIONS
        table.add_row("", "", f"[dim]not listed: {more} more before the last, divided elsewhere; --json has them[/]")
    return table


def _holders(shares: Sequence[Share], shape: Sequence[int]) -> RenderableType:
    if not shares:
        return "[dim]other replicas[/]"
    if (blocks := _blocks(shares, shape)) is not None:
        return blocks
    words = [f"[bold]{ranks_text(share.ranks)}[/]: {share_text(share, shape)}" for share in shares]
    if len(words) > _SHARES:
        words = [*words[:2], f"… {len(words) - 3} more", words[-1]]
    return " · ".join(words)


def _blocks(shares: Sequence[Share], shape: Sequence[int]) -> RenderableType | None:
    """Shares that cut a matrix both ways into few enough parts, as a table of its rows and columns."""
    if len(shape) != 2 or any(len(share.boxes) > 1 for share in shares):
        return None
    holders = {share.boxes[0]: ranks_text(share.ranks) for share in shares}
    rows, columns = (sorted({box[dim] for box in holders}) for dim in (0, 1))
    if min(len(rows), len(columns)) == 1 or max(len(rows), len(columns)) > _SHARES:
        return None
    if len(rows) * len(columns) != len(holders):
        return None
    table = _table("columns", *map(span_text, columns))
    table.columns[0].justify = "right"
    for at, row in enumerate(rows):
        cells = [f"[bold]{holders[row, column]}[/]" for column in columns]
        table.add_row(f"[dim]{'rows ' * (at == 0)}{span_text(row)}[/]", *cells)
    return table


def _table(*heads: str) -> Table:
    table = Table(show_header=bool(heads), box=None, pad_edge=False, header_style="dim")
    for head in heads:
        table.add_column(escape(head))
    return table


def _indented(what: RenderableType) -> RenderableType:
    return Padding(what, (0, 0, 0, 2))
