"""A layout for people: what it means, which rank sits where, and who holds which part of each weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from shoal.report.ownership import KINDS, Kind, Ownership, Share
from shoal.report.wording import counted, few, keeps, meaning, ranks_text, section_text, share_text, units_text

_SHARES, _SECTIONS = 8, 8
"""Holders of one tensor and kinds of layers of one stage that are listed: of more, the first ones and the last."""


def layout_report(owned: Ownership) -> RenderableType:
    """Everything that ``shoal layout`` prints."""
    parts = [*_meaning(owned), *_seats(owned)]
    if owned.layout.pp > 1:
        parts += ["", "[bold]where it is cut[/]", _indented(escape(_cut(owned)))]
    for stage in range(len(owned.stages)):
        parts += _stage(owned, stage)
    return Group(*parts)


def _meaning(owned: Ownership) -> Iterator[RenderableType]:
    yield f"[bold]{escape(str(owned.layout))}[/] on {counted(owned.layout.ranks, 'rank')}"
    table = _table()
    for key, what, cost in meaning(owned.layout):
        table.add_row(f"[bold]{escape(key)}[/]", escape(what) + (f"\n[dim]{escape(cost)}[/]" if cost else ""))
    yield _indented(table)


def _seats(owned: Ownership) -> Iterator[RenderableType]:
    """The ranks by their coordinates: the fastest axis from left to right, the others downwards."""
    places = [owned.grid.coords(rank) for rank in owned.ranks]
    *down, across = [name for name in owned.grid.names if len({place[name] for place in places}) > 1] or ["dp"]
    table = _table(*down, f"{across} 0 → {places[-1][across]}")
    width = len(str(owned.ranks[-1]))
    for row, ranks in groupby(owned.ranks, lambda rank: [str(owned.grid.coords(rank)[name]) for name in down]):
        table.add_row(*row, "  ".join(f"{rank:>{width}}" for rank in ranks))
    yield ""
    yield "[bold]which rank sits where[/]" + (f": the first of {owned.replicas} replicas" if owned.is_part else "")
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


def _stage(owned: Ownership, stage: int) -> Iterator[RenderableType]:
    names, ranks = units_text([owned.units[unit] for unit in owned.stages[stage]]), owned.ranks_of(stage)
    yield ""
    if owned.layout.pp > 1:
        who = f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"
        yield f"[bold]stage {stage}[/] on {who}: {escape(names)}, {owned.cost_share(stage):.0%} of the cost"
    else:
        yield f"[bold]who holds what[/]: {escape(names)}"
    for kind, title in zip(KINDS, keeps(owned.layout), strict=False):
        counts = [owned.count(rank, kind) for rank in ranks]
        spread = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
        yield _indented(f"[dim]{title}; a rank has {spread} of {owned.elements:,}[/]")
        yield _indented(_holdings(owned, stage, kind))


def _holdings(owned: Ownership, stage: int, kind: Kind) -> RenderableType:
    """Who holds what of each weight, consecutive layers together where they are held alike."""
    table = _table()
    sections = owned.sections(stage, kind)
    for section in few(sections, _SECTIONS):
        name = section_text(section, owned.units)
        if kind == "state" and (holder := section.alone(kind)) is not None:
            table.add_row(f"[italic]{escape(name)}[/]", "", f"[bold]{ranks_text(holder)}[/]: everything")
            continue
        table.add_row(f"[italic]{escape(name)}[/]")
        for one in section.held:
            table.add_row(f"  {escape(one.label)}", " × ".join(map(str, one.shape)), _holders(one.of(kind), one.shape))
    if len(sections) > _SECTIONS:
        more = len(sections) - _SECTIONS
        table.add_row("", "", f"[dim]not listed: {more} more before the last, divided elsewhere; --json has them[/]")
    return table


def _holders(shares: Sequence[Share], shape: Sequence[int]) -> str:
    if not shares:
        return "[dim]other replicas[/]"
    words = [f"[bold]{ranks_text(share.ranks)}[/]: {share_text(share, shape)}" for share in shares]
    if len(words) > _SHARES:
        words = [*words[:2], f"… {len(words) - 3} more", words[-1]]
    return " · ".join(words)


def _table(*heads: str) -> Table:
    table = Table(show_header=bool(heads), box=None, pad_edge=False, header_style="dim")
    for head in heads:
        table.add_column(escape(head))
    return table


def _indented(what: RenderableType) -> RenderableType:
    return Padding(what, (0, 0, 0, 2))
