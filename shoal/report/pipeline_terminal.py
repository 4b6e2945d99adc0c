"""A pipeline schedule in a terminal: a row a rank, time from left to right, and what the picture comes to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import ceil, floor
from typing import NamedTuple, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from shoal.report.pipeline import Bar, Pipeline, clock
from shoal.report.pipeline_colours import DARK, WORDS, Tone, tone
from shoal.report.pipeline_words import chunk_words, figures, headline, times_words

IDLE = Tone("#2a313a", "#2a313a")
PARITY = 0.045
"""By how much every other micro-batch is lighter, so that one ends and the next begins without a gap."""

_SLACK = 1e-9
_What = TypeVar("_What")


def pipeline_report(seen: Pipeline) -> RenderableType:
    """Everything that ``shoal schedule`` prints of a schedule."""
    return Group(
        f"[bold]{escape(headline(seen))}[/]",
        f"[dim]{escape(times_words(seen))}[/]",
        "",
        Timeline(seen),
        "",
        _table(seen),
    )


class Timeline:
    """The rows, as wide as there is room: each column is the same time. Colours where the console has them."""

    def __init__(self, seen: Pipeline) -> None:
        self._seen = seen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seen, plain = self._seen, console.color_system is None or console.no_color
        names = [f"rank {rank}" for rank in range(seen.ranks)]
        live = [clock(peak) for peak in seen.peaks]
        left, right = max(map(len, names)) + 2, max(map(len, [*live, "live"])) + 2
        longest = seen.digits + plain * (1 + (len(str(len(seen.home))) + 1) * (seen.chunks > 1))
        scale = _scale(seen, longest, max(options.max_width - left - right, 8), 1 if plain else 2)
        columns = max(1, ceil(seen.end * scale - _SLACK))
        versions = seen.is_stream and scale * seen.shortest >= 1  # else there is no room for most of them
        yield from line(f"{'':{left}}{_ruler(seen, scale, columns):{columns}}{'live':>{right}}", dim=True)
        for rank, bars in enumerate(seen.bars):
            runs = list(_runs(bars, scale, columns))
            yield Segment(f"{names[rank]:<{left}}")
            yield from (_in_letters(seen, run) if plain else _in_colour(seen, run) for run in runs)
            yield from line(f"{live[rank]:>{right}}")
            if versions:
                yield from line(" " * (left - 2) + "↳ " + "".join(map(_version, runs)), dim=True)
        yield from line("")
        yield from _legend(seen, plain, versions)


class _Run(NamedTuple):
    """Columns that look alike: what a rank does in their left halves and in their right halves."""

    left: Bar | None
    right: Bar | None
    columns: int


def _scale(seen: Pipeline, longest: int, room: int, parts: int) -> float:
    """Columns for a unit of time: those at which every label fits, with a blank after it, or as many as there are; then
    the shortest pass has a whole number of ``parts`` of a column, unless it has less than one column."""
    each = min(longest + 1, room / seen.end * seen.shortest)
    return (floor(parts * each + _SLACK) / parts if each >= 1 else each) / seen.shortest


def in_halves(times: Iterable[tuple[float, float, _What]], scale: float, columns: int) -> list[_What | None]:
    """A row of what there is from when to when: half a column shows what is in its middle."""
    halves: list[_What | None] = [None] * (2 * columns)
    for start, stop, what in times:
        for at in range(*(ceil(2 * scale * time - 0.5 - _SLACK) for time in (start, stop))):
            halves[at] = what
    return halves


def _runs(bars: Sequence[Bar], scale: float, columns: int) -> Iterator[_Run]:
    halves = in_halves(((bar.start, bar.stop, bar) for bar in bars), scale, columns)
    for (left, right), run in groupby(zip(halves[::2], halves[1::2], strict=True)):
        yield _Run(left, right, len(list(run)))


def _in_colour(seen: Pipeline, run: _Run) -> Segment:
    if run.left is not run.right:
        return Segment("▌", Style(color=_tone(seen, run.left).fill, bgcolor=_tone(seen, run.right).fill))
    words = _number(run.left.act.micro_batch, run.columns) if run.left else ""
    fill, ink = _tone(seen, run.left)
    return Segment(f"{words:<{run.columns}}", Style(color=ink, bgcolor=fill))


def _in_letters(seen: Pipeline, run: _Run) -> Segment:
    """What a pass is, as far as there is room; then dashes up to its end."""
    bar = run.left or run.right
    if bar is None:
        return Segment("·" * run.columns)
    act = bar.act
    whole = f"{act.op.value}{act.stage}.{act.micro_batch}" if seen.chunks > 1 else f"{act.op.value}{act.micro_batch}"
    words = whole if len(whole) <= run.columns else act.op.value
    return Segment(words.ljust(run.columns - 1, "-").ljust(run.columns))


def _version(run: _Run) -> str:
    """Apart from the next one, unless it is a single digit."""
    words = str(run.left.version) if run.left and run.left is run.right else ""
    return f"{words if len(words) < max(run.columns, 2) else '':<{run.columns}}"


def _number(number: int, columns: int) -> str:
    """As much as there is room for: else the last digit."""
    return words if len(words := str(number)) <= columns else words[-1]


def _tone(seen: Pipeline, bar: Bar | None) -> Tone:
    if bar is None:
        return IDLE
    return tone(bar.act.op, bar.chunk, seen.chunks, DARK, PARITY * (bar.act.micro_batch % 2))


def _ruler(seen: Pipeline, scale: float, columns: int) -> str:
    """Times above the columns where they are; in a stream, of its parts."""
    times = [time for time, _ in seen.marks] or [0.0]
    row = ""
    for time in [*times, seen.end]:
        words = clock(time)
        at = min(round(time * scale), columns - len(words))
        if at >= len(row) + bool(row):
            row = row.ljust(at) + words
    return row


def _legend(seen: Pipeline, plain: bool, versions: bool) -> Iterator[Text]:
    legend = Text()
    for op in seen.ops:
        for chunk in range(0 if plain else seen.chunks):
            legend.append("  ", Style(bgcolor=tone(op, chunk, seen.chunks, DARK).fill))
        legend.append(f"{' ' * (not plain)}{op.value} {WORDS[op]}   ")
    legend.append("·" if plain else "  ", None if plain else Style(bgcolor=IDLE.fill))
    yield legend.append(" idle")
    if plain:
        notes = ["after the letter, where there is room: " + "stage." * (seen.chunks > 1) + "micro-batch"]
    else:
        notes = ["numbers are those of micro-batches, or their last digits", *chunk_words(seen)]
    if versions:
        notes.append("after ↳, where there is room: how many updates the weights have had that the pass uses")
    yield Text("; ".join(notes), style="dim")


def line(words: str, dim: bool = False) -> Iterator[Segment]:
    """A line of text among rows."""
    yield Segment(words, Style(dim=True) if dim else None)
    yield Segment.line()


def _table(seen: Pipeline) -> RenderableType:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value, what in figures(seen):
        table.add_row(name, f"[bold]{value}[/]", f"[dim]{escape(what)}[/]")
    return table
