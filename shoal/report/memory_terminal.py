"""What each rank of a step held, in a terminal: a bar a phase, and the numbers."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from shoal.memory.account import Memory, Moment
from shoal.report.memory_colours import colour
from shoal.report.memory_words import (
    HOST_WORDS,
    WORDS,
    has_host,
    headline,
    parts,
    shown,
    unit_of,
    what_is_measured,
    what_it_is_of,
)
from shoal.report.pipeline_colours import DARK

_GREY = "#7d8590"
_LETTERS = dict(zip(WORDS, "PGOALC·", strict=True))
"""Of bars without colours."""


def memory_report(memory: Memory) -> RenderableType:
    """Everything that ``shoal report --memory`` prints, but what to do next."""
    return Group(
        f"[bold]{escape(headline(memory))}[/]",
        f"[dim]{escape(what_it_is_of(memory, shown(memory)))}[/]",
        f"[dim]{escape(what_is_measured())}[/]",
        "",
        Bars(memory),
        "",
        _numbers(memory),
    )


class Bars:
    """A row a rank and phase, as wide as there is room: each column is as many bytes. Colours where there are some."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        memory, plain = self._memory, console.color_system is None or console.no_color
        unit, ranks = unit_of(memory), [memory.ranks[rank] for rank in shown(memory)]
        names = max(len(rank.name) for rank in ranks) + 2
        phases = max(len(phase) for rank in ranks for phase in rank.phases) + 2
        number = max(len(unit.of(moment.total)) for moment in memory.moments) + len(unit.name) + 2
        columns = max(options.max_width - names - phases - number, 8)
        most = max(moment.total for moment in memory.moments)
        for rank in ranks:
            for place, (phase, moment) in enumerate(rank.phases.items()):
                yield Segment(f"{rank.name if place == 0 else '':<{names}}")
                yield Segment(f"{phase:<{phases}}", Style(dim=True))
                yield from _bar(moment, columns / max(most, 1), plain)
                yield Segment(f" {unit.of(moment.total)} {unit.name}")
                yield Segment.line()
        yield Segment.line()
        yield from _legend(memory, plain)


def _bar(moment: Moment, scale: float, plain: bool) -> Iterator[Segment]:
    start = 0
    for part, nbytes in parts(moment).items():
        width = round((start + nbytes) * scale) - round(start * scale)
        start += nbytes
        if plain:
            yield Segment(_LETTERS[part] * width)
        else:
            yield Segment(" " * width, Style(bgcolor=colour(part, DARK.only, _GREY)[0]))


def _legend(memory: Memory, plain: bool) -> Iterator[Text]:
    legend = Text()
    for part, words in WORDS.items():
        if any(parts(moment)[part] for moment in memory.moments):
            sign = _LETTERS[part] if plain else " "
            legend.append(f" {sign} ", Style() if plain else Style(bgcolor=colour(part, DARK.only, _GREY)[0]))
            legend.append(f" {words}   ")
    yield legend


def _numbers(memory: Memory) -> Table:
    """Of every rank and phase, each part and the total."""
    unit, hosted = unit_of(memory), has_host(memory)
    names = [part for part in WORDS if any(parts(moment)[part] for moment in memory.moments)]
    table = Table("rank", "phase", box=None, pad_edge=False, header_style="dim")
    for name in (*names, f"total {unit.name}", *(["host"] if hosted else [])):
        table.add_column(name, justify="right")
    for rank in (memory.ranks[number] for number in shown(memory)):
        for place, (phase, moment) in enumerate(rank.phases.items()):
            numbers = [unit.of(nbytes) if (nbytes := parts(moment)[part]) else "" for part in names]
            total = [f"[bold]{unit.of(moment.total)}[/]"]
            host = [unit.of(moment.host) if moment.host else ""] if hosted else []
            table.add_row(rank.name if place == 0 else "", phase, *numbers, *total, *host)
    if hosted:
        table.caption, table.caption_justify = f"host: {HOST_WORDS}", "left"
    return table
