"""A step as it ran over its simulation, in a terminal: two rows a rank on one clock, and what they come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from shoal.pipeline.program import PASSES
from shoal.report.overlay import Overlay, Slice
from shoal.report.overlay_words import figures, headline, ms, others_words, waits, what_is_compared, what_it_is_of
from shoal.report.pipeline import percent
from shoal.report.pipeline_colours import DARK, WORDS, Tone, tone
from shoal.report.pipeline_terminal import IDLE, PARITY, in_halves, line

_REST = Tone("#7d8590", "#0d1117")


def overlay_report(seen: Overlay) -> RenderableType:
    """Everything that ``shoal report`` prints of a step."""
    return Group(
        f"[bold]{escape(headline(seen))}[/]",
        f"[dim]{escape(what_it_is_of(seen))}; {escape(others_words(seen))}[/]",
        f"[dim]{escape(what_is_compared(seen))}[/]",
        "",
        Lanes(seen),
        "",
        _figures(seen),
        "",
        _ranks(seen),
        "",
        _stages(seen),
        "",
        _waits(seen),
    )


class Lanes:
    """The rows, as wide as there is room: each column is the same time. Colours where the console has them."""

    def __init__(self, seen: Overlay) -> None:
        self._seen = seen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seen, plain = self._seen, console.color_system is None or console.no_color
        names = [f"rank {rank}" for rank in seen.ranks]
        left = max(map(len, names)) + 2 + len("simulated  ")
        columns = max(options.max_width - left, 8)
        end = ms(max(seen.measured.end, seen.simulated.end))
        scale = columns / max(seen.measured.end, seen.simulated.end)
        yield from line(f"{'':{left}}0{end:>{columns - 1}}", dim=True)
        for place, name in enumerate(names):
            for title, course in (("measured", seen.measured), ("simulated", seen.simulated)):
                yield Segment(f"{name if course is seen.measured else '':<{left - 11}}")
                yield Segment(f"{title:<11}", Style(dim=True))
                cells = _cells(course.lanes[place], scale, columns)
                yield from self._in_letters(cells) if plain else self._in_colour(cells, place)
                yield Segment.line()
        yield from line("")
        yield from self._legend(plain)

    def _in_colour(self, cells: Sequence[Slice | None], place: int) -> Iterator[Segment]:
        for (left, right), run in groupby(zip(cells[::2], cells[1::2], strict=True)):
            width, (fill, ink) = len(list(run)), self._tone(left, place)
            if left is not right:
                yield Segment("▌", Style(color=fill, bgcolor=self._tone(right, place).fill))
            else:
                number = str(left.act.micro_batch) if left and left.act.op in PASSES else ""
                words = number if len(number) <= width else ""
                yield Segment(f"{words:<{width}}", Style(color=ink, bgcolor=fill))

    def _in_letters(self, cells: Sequence[Slice | None]) -> Iterator[Segment]:
        """What a pass is, as far as there is room; then dashes up to its end."""
        several = any(len(stages) > 1 for stages in self._seen.stages)
        for one, run in groupby(cells[::2]):
            width = len(list(run))
            if one is None or one.act.op not in PASSES:
                yield Segment(("·" if one is None else "=") * width)
                continue
            op, stage, number, _ = one.act
            whole = f"{op.value}{stage}.{number}" if several else f"{op.value}{number}"
            yield Segment((whole if len(whole) <= width else op.value).ljust(width, "-"))

    def _tone(self, one: Slice | None, place: int) -> Tone:
        if one is None:
            return IDLE
        op, stage, number, _ = one.act
        if op not in PASSES:
            return _REST
        stages = self._seen.stages[place]
        return tone(op, stages.index(stage), len(stages), DARK, PARITY * (number % 2))

    def _legend(self, plain: bool) -> Iterator[Text]:
        seen, legend = self._seen, Text()
        for op in seen.ops:
            chunks = len(seen.stages[0])
            for chunk in range(0 if plain else chunks):
                legend.append("  ", Style(bgcolor=tone(op, chunk, chunks, DARK).fill))
            legend.append(f"{' ' * (not plain)}{op.value} {WORDS[op]}   ")
        for letter, colour, words in (("=", _REST, "what is no pass"), ("·", IDLE, "idle")):
            legend.append(letter if plain else "  ", None if plain else Style(bgcolor=colour.fill))
            legend.append(f" {words}   ")
        yield legend
        numbers = "stage.micro-batch" if plain and len(seen.stages[0]) > 1 else "micro-batch"
        notes = [f"{'after the letter' if plain else 'on a pass'}, where there is room: {numbers}"]
        if seen.is_stream:
            notes.append("below zero: of the steps before")
        yield Text("; ".join(notes), style="dim")


def _cells(lane: Sequence[Slice], scale: float, columns: int) -> list[Slice | None]:
    """A row, with what was done for an action before its rank waited."""
    befores = ((since := one.start - one.waited - one.before, since + one.before, one) for one in lane)
    return in_halves(chain(befores, ((one.start, one.stop, one) for one in lane)), scale, columns)


def _figures(seen: Overlay) -> Table:
    table = Table("", "measured", "simulated", "", box=None, pad_edge=False, header_style="dim")
    for name, measured, simulated, meaning in figures(seen):
        table.add_row(name, f"[bold]{measured}[/]", f"[bold]{simulated}[/]", f"[dim]{escape(meaning)}[/]")
    return table


def _ranks(seen: Overlay) -> Table:
    """Where the time of each rank goes."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("rank", "stages", "busy: measured", "simulated", "waits: measured", "simulated", "rest"):
        table.add_column(head, justify="left" if head == "stages" else "right")
    shares = zip(
        seen.measured.busy,
        seen.simulated.busy,
        seen.measured.waiting,
        seen.simulated.waiting,
        seen.measured.rest,
        strict=True,
    )
    for rank, stages, row in zip(seen.ranks, seen.stages, shares, strict=True):
        table.add_row(str(rank), ", ".join(map(str, stages)), *map(percent, row))
    return table


def _stages(seen: Overlay) -> Table:
    """What passes take."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("stage", *(WORDS[op] for op in seen.ops)):
        table.add_column(head, justify="right")
    for stage, times in enumerate(seen.times):
        table.add_row(str(stage), *(ms(times[op]) if op in times else "" for op in seen.ops))
    return table


def _waits(seen: Overlay) -> RenderableType:
    tables: list[RenderableType] = []
    for heading, found in waits(seen):
        table = Table(box=None, pad_edge=False, header_style="dim")
        for head in ("rank", heading, "measured", "simulated"):
            table.add_column(head, justify="left" if head is heading else "right")
        for rank, act, measured, simulated in found:
            table.add_row(str(rank), act.in_words(), ms(measured), ms(simulated))
        tables += ["", table]
    return Group(*tables[1:]) if tables else Text("no rank waited for another")
