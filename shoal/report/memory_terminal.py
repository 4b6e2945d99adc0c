"""What each rank of a step held, in a terminal: a bar a phase, and the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from shoal.memory.account import BEFORE, PHASES, Memory, Moment
from shoal.report.memory_colours import colour
from shoal.report.memory_words import (
    HOST_PARTS,
    WORDS,
    headline,
    host_parts,
    parts,
    shown,
    unit_of,
    what_is_measured,
    what_it_is_of,
)
from shoal.report.pipeline_colours import DARK

_GREY = "#7d8590"
_SHORT = {BEFORE: "before"}
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
    """Of every rank: each part in each phase, the total, and what is on the host."""
    unit = unit_of(memory)
    ranks = [memory.ranks[number] for number in shown(memory)]
    phases = [phase for phase in PHASES if any(phase in rank.phases for rank in ranks)]
    table = Table("", *(_SHORT.get(phase, phase) for phase in phases), box=None, pad_edge=False, header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(words: str, numbers: Sequence[int], style: str = "") -> None:
        if any(numbers):
            table.add_row(words, *(unit.of(nbytes) if nbytes else "" for nbytes in numbers), style=style)

    for rank in ranks:
        moments = [rank.phases.get(phase, Moment({}, {})) for phase in phases]
        table.add_row(f"[bold]{escape(rank.name)}[/], {unit.name}")
        for part in WORDS:
            row(f"  {part}", [parts(moment)[part] for moment in moments])
        row("  on the device", [moment.total for moment in moments], "bold")
        for part in HOST_PARTS:
            row(f"  host: {part}", [host_parts(moment)[part] for moment in moments], "dim")
        row("  on the host", [moment.host for moment in moments])
    return table
