"""A step as it ran over its simulation, in words: what was measured, where the time went, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from shoal.layout.kinds import SCHEDULES
from shoal.pipeline.program import Op
from shoal.report.overlay import Overlay, Wait
from shoal.report.pipeline import percent

_UNEVEN = 1.1
"""How many times the mean work a rank may have before the cut is worth a look."""


class Figure(NamedTuple):
    """A number as measured and as simulated, and what it means."""

    name: str
    measured: str
    simulated: str
    meaning: str


def headline(seen: Overlay) -> str:
    """``zb-v: 2 ranks × 2 stages, 4 micro-batches, step 4``."""
    ranks, chunks, m = len(seen.ranks), len(seen.stages[0]), seen.trace.micro_batches
    who = f"{ranks} rank" + "s" * (ranks > 1) + f" × {chunks} stages" * (chunks > 1)
    return f"{seen.trace.schedule}: {who}, {m} micro-batch{'es' * (m > 1)}, step {seen.step}"


def what_it_is_of(seen: Overlay) -> str:
    """The layout, and which of its pipelines."""
    of = f", ranks {', '.join(map(str, seen.ranks))}" if len(seen.trace.pipelines) > 1 else ""
    return f"layout {seen.trace.layout}{of}"


def what_is_compared(seen: Overlay) -> str:
    """The rule of the simulation."""
    moving = f"and a message {ms(seen.transfer)}" if seen.transfer is not None else "and messages nothing"
    return f"simulated: the same program, in which every pass takes the mean of its kind and stage, {moving}"


def others_words(seen: Overlay) -> str:
    """What else the trace has."""
    steps, pipelines = seen.trace.steps, len(seen.trace.pipelines)
    words = f"traced: step{'s' * (len(steps) > 1)} {' to '.join(map(str, sorted({steps[0], steps[-1]})))}"
    return words + " (--step)" * (len(steps) > 1) + f", {pipelines} pipelines (--rank)" * (pipelines > 1)


def figures(seen: Overlay) -> Iterator[Figure]:
    """Everything that the picture comes to."""
    ran, simulated = seen.measured, seen.simulated
    what = "its first micro-batch to the next step's" if seen.is_stream else "first pass to last"
    yield Figure("step", ms(ran.length), ms(simulated.length), f"{seen.ratio:.3f} of simulated: {what}")
    if not seen.is_stream:
        yield Figure("whole step", ms(ran.end), "", "with reductions, norm and update")
    bubble = percent(ran.bubble_per_work), percent(simulated.bubble_per_work)
    yield Figure("bubble/work", *bubble, "time without a pass, for a unit of work")
    bubble = percent(ran.bubble_share), percent(simulated.bubble_share)
    yield Figure("bubble/time", *bubble, "share of the step without a pass")


def waits(seen: Overlay, most: int = 4) -> Iterator[tuple[str, tuple[Wait, ...]]]:
    """(heading, waits): the longest, and those that the simulation does not have."""
    for heading, found in (("longest waits", seen.waits), ("longest beyond the simulation", seen.surprises)):
        if found:
            yield heading, found[:most]


def next_steps(seen: Overlay, asked: Path, trace: Path, drawn: bool) -> Iterator[tuple[str, str]]:
    """(what for, command): ``asked`` is what the report was asked of, ``trace`` its file."""
    if not drawn:
        yield "a picture of both", f"shoal report {_quoted(asked)} --out {_quoted(trace.with_name('report.svg'))}"
    yield "every action, to zoom into", f"open {trace} at https://ui.perfetto.dev"
    run = trace.with_name("run.toml")
    work = [one / fmean(seen.measured.busy) for one in seen.measured.busy]
    if (most := max(work)) > _UNEVEN and run.exists():
        what = f"rank {seen.ranks[work.index(most)]} works {most:.2g} × the mean: its layers"
        yield what, f"shoal layout {shlex.quote(seen.trace.layout)} --run {_quoted(run)}"
    if len(seen.ranks) > 1 and not seen.is_stream:
        other = "list" if seen.trace.schedule != "list" else "zb-v"
        m = SCHEDULES[other].nearest_mb(len(seen.ranks), seen.trace.micro_batches)[-1]
        chunks = f" -v {len(seen.stages[0])}" if other == "list" and len(seen.stages[0]) > 1 else ""
        line = f"shoal schedule {other} -p {len(seen.ranks)} -m {m}{chunks} --times {_times(seen)}"
        yield "an order made for these times" if other == "list" else "another schedule with these times", line


def ms(time: float) -> str:
    """A time in few digits, the same number of them behind the point for times of one size."""
    return f"{time:,.{0 if time >= 1000 else 1 if time >= 100 else 2}f} ms"


def _times(seen: Overlay) -> str:
    """``F,I,W,C`` of a rank, on average. A backward pass that is nowhere in two has halves that are taken for alike."""
    total = {op: sum(times.get(op, 0.0) for times in seen.times) / len(seen.ranks) for op in Op}
    whole = total[Op.BACKWARD] if not total[Op.INPUT_GRADIENT] else 0.0
    values = total[Op.FORWARD], total[Op.INPUT_GRADIENT] + whole / 2, total[Op.WEIGHT_GRADIENT] + whole / 2
    return ",".join(f"{value:.4g}" for value in (*values, seen.transfer or 0.0))


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
