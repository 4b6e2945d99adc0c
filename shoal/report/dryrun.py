"""What a rank that has been run dry would take: its memory, what it receives, and its Program, in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import join
from typing import Protocol

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from shoal.comm.ledger import MESSAGE, Entry
from shoal.layout import Layout
from shoal.memory.account import Memory, RankMemory
from shoal.mesh import Grid
from shoal.pipeline.program import Act, Op
from shoal.purposes import ACTIVATIONS, GRADIENTS, PARAMETERS, STATES
from shoal.report.memory_terminal import Bars
from shoal.report.memory_words import HOST_PARTS, WORDS, host_parts, parts, unit_of
from shoal.report.wording import counted
from shoal.sizes import Unit, size_text

_SHOWN = 24
"""Actions, at most."""


class Found(Protocol):
    """What a dry run has found; :class:`~shoal.train.dryrun.DryRun`."""

    @property
    def layout(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def memory(self) -> RankMemory: ...
    @property
    def received(self) -> tuple[Entry, ...]: ...
    @property
    def actions(self) -> tuple[Act, ...]: ...


def dryrun_report(found: Found, seconds: float) -> RenderableType:
    """Everything that ``shoal dryrun`` prints, but what to do next; it has taken ``seconds``."""
    memory = Memory(found.layout, found.step, (replace(found.memory, name=f"rank {found.rank}"),))
    phase = found.memory.highest
    unit, peak = unit_of(memory), found.memory.phases[phase].total
    return Group(
        "",
        f"[bold]{escape(found.memory.name)} needs {unit.of(peak)} {unit.name} on its device[/], in phase {phase}",
        f"[dim]layout {escape(found.layout)}, {counted(found.world, 'rank')}; step {found.step}; run dry in "
        f"{seconds:.0f} s[/]",
        "",
        Bars(memory),
        "",
        _held(found.memory, unit),
        "",
        _received(found.received),
        "",
        _program(found.actions),
    )


def _held(memory: RankMemory, unit: Unit) -> Table:
    """Of every part what there is of it in each phase."""
    moments = memory.phases.values()
    table = Table(unit.name, box=None, pad_edge=False, header_style="dim")
    for phase in memory.phases:
        table.add_column(phase, justify="right")
    for part, words in WORDS.items():
        if any(parts(moment)[part] for moment in moments):
            table.add_row(words, *(unit.of(held) if (held := parts(moment)[part]) else "" for moment in moments))
    table.add_row("[bold]on the device[/]", *(f"[bold]{unit.of(moment.total)}[/]" for moment in moments))
    for part in HOST_PARTS:
        on_host = [host_parts(moment)[part] for moment in moments]
        if any(on_host):
            table.add_row(f"on the host: {part}", *(unit.of(held) if held else "" for held in on_host))
    return table


def _received(entries: Sequence[Entry]) -> RenderableType:
    if not entries:
        return "receives nothing from other ranks"
    table = Table("received in a step", "over", "for", box=None, pad_edge=False, header_style="dim")
    for name in ("times", "words", "bytes"):
        table.add_column(name, justify="right")
    for entry in sorted(entries, key=lambda one: -one.bytes):
        collective = entry.collective.replace("_", "-") if entry.collective != MESSAGE else "message from a rank"
        numbers_of = (f"{entry.calls:,}", f"{entry.words:,.0f}", size_text(entry.bytes))
        table.add_row(collective, escape(entry.axis), escape(entry.purpose), *numbers_of)
    total = sum(entry.bytes for entry in entries)
    table.add_row("[bold]in all[/]", "", "", f"{sum(entry.calls for entry in entries):,}", "", size_text(total))
    return table


def _program(actions: Sequence[Act]) -> str:
    """How many of each, and the first ones."""
    counts = Counter(act.op for act in actions)
    passes = (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
    words = ("forward passes", "backward passes", "input-gradient passes", "weight-gradient passes")
    told = [f"{counts[op]} {word}" for op, word in zip(passes, words, strict=True) if counts[op]]
    first = " ".join(map(str, actions[:_SHOWN])) + " …" * (len(actions) > _SHOWN)
    return f"{len(actions)} actions, of them {', '.join(told)}\n[dim]{escape(first)}[/]"


def next_steps(found: Found, layout: Layout, run: Path, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(what for, command)."""
    grid = Grid(layout.axes)
    coords = grid.coords(found.rank)
    settings = [word for one in overrides for word in ("--set", one)]

    def again(line: str, rank: int) -> str:
        return join(["shoal", "dryrun", str(run), "--layout", line, "--rank", str(rank), *settings])

    if layout.pp > 1:
        other = layout.pp - 1 if coords["pp"] == 0 else 0
        name = "last" if other else "first"
        yield f"the {name} stage of the pipeline", again(found.layout, grid.rank({**coords, "pp": other}))
    moment = found.memory.phases[found.memory.highest]
    held = parts(moment)
    largest = max(held, key=lambda part: held[part])
    shares = layout.dp > 1 and layout.sync == "allreduce" and not layout.asynchronous
    if largest == ACTIVATIONS and layout.recompute == "none":
        yield "less for activations", again(str(replace(layout, recompute="full")), found.rank)
    for part, stage in ((STATES, 1), (GRADIENTS, 2), (PARAMETERS, 3)):
        if largest == part and shares and layout.zero < stage:
            yield f"less for {part}", again(str(replace(layout, zero=stage)), found.rank)
    yield "who holds what", join(["shoal", "layout", found.layout, "--run", str(run)])
