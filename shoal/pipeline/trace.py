"""What really ran: when each action began, had what it waited for, and ended; as a picture, and beside the simulation.

Times are seconds of the wall clock, which all processes of a machine share; between machines they agree as far as the
clocks do. They are what this process saw: a GPU may do later what was asked of it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from shoal.pipeline.program import PASSES, Act, Op, Program
from shoal.pipeline.simulate import Costs, simulate


class Event(NamedTuple):
    """An action that ran. Until ``ready``, it waited for what it takes in."""

    act: Act
    start: float
    ready: float
    stop: float

    def as_json(self) -> list[Any]:
        return [self.act.op.value, *self.act[1:], *self[1:]]

    @classmethod
    def read(cls, values: Sequence[Any]) -> Event:
        op, stage, micro_batch, peer, *times = values
        return cls(Act(Op(op), stage, micro_batch, peer), *times)


class Recorder:
    """Writes down, while it is ``on``, the actions that an executor performs, one list for each program that is run."""

    def __init__(self) -> None:
        self.on = False
        self.runs: list[list[Event]] = []
        self._ready = 0.0

    def around(self, perform: Callable[[Act], None]) -> Callable[[Act], None]:
        """``perform``, which now writes down a program, if this is on."""
        if not self.on:
            return perform
        events: list[Event] = []
        self.runs.append(events)

        def recorded(act: Act) -> None:
            start = self._ready = time.time()
            perform(act)
            events.append(Event(act, start, self._ready, time.time()))

        return recorded

    def arrived(self) -> None:
        """The action under way has what it waited for."""
        if self.on:
            self._ready = time.time()


Runs = Sequence[Sequence[Event]]
"""What one rank ran: a list for each step."""


def chrome_trace(ranks: Sequence[Runs], names: Sequence[str], first: int) -> dict[str, Any]:
    """A trace for Perfetto or chrome://tracing, as JSON: a process for each rank, called by its name, and in it a row
    for each stage, and one for what concerns the step. ``first`` is the number of the first step of all ``ranks``.

    Source: Trace Event Format (Google, 2016), of which Perfetto reads complete ("X") and metadata ("M") events.
    """
    begin = min(event.start for runs in ranks for run in runs for event in run)

    def entry(name: str, rank: int, act: Act, start: float, stop: float, **more: Any) -> dict[str, Any]:
        times = {"ts": 1e6 * (start - begin), "dur": 1e6 * (stop - start)}
        return {"name": name, "ph": "X", "pid": rank, "tid": act.stage + 1, **times, **more}

    entries: list[dict[str, Any]] = []
    for rank, (runs, name) in enumerate(zip(ranks, names, strict=True)):
        rows = sorted({event.act.stage for run in runs for event in run})
        titles = {stage + 1: "the step" if stage < 0 else f"stage {stage}" for stage in rows}
        entries.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": name}})
        entries += (
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": title}}
            for row, title in titles.items()
        )
        for step, run in enumerate(runs, first):
            for act, start, ready, stop in run:
                what = {"what": act.in_words(), "step": step}
                entries.append(entry(str(act), rank, act, start, stop, cat=_category(act), args=what))
                if ready > start:
                    entries.append(entry("wait", rank, act, start, ready, cat="wait"))
    return {"displayTimeUnit": "ms", "traceEvents": entries}


def _category(act: Act) -> str:
    if act.op in PASSES:
        return "pass"
    return "message" if act.peer >= 0 else "step"


class Timed(NamedTuple):
    """A pass as it ran, and as the simulation has it. Seconds from the beginning of the step's first pass."""

    rank: int
    act: Act
    took: float
    stop: float
    expected: float

    @property
    def late(self) -> float:
        """How much later it ended than it would have, had messages, and whatever else is no pass, taken no time."""
        return self.stop - self.expected


@dataclass(frozen=True)
class Comparison:
    """The passes of a step, and how long it took from the first to the last, in seconds."""

    passes: tuple[Timed, ...]
    took: float
    expected: float

    def by_stage(self) -> Iterator[tuple[int, str, float, float, float]]:
        """Stage, pass, its median time, and by how much it was late: median and most."""
        groups: dict[tuple[int, str], list[Timed]] = defaultdict(list)
        for one in self.passes:
            groups[one.act.stage, one.act.op.value].append(one)
        for (stage, op), found in sorted(groups.items()):
            late = [one.late for one in found]
            yield stage, op, median(one.took for one in found), median(late), max(late)


def compare(programs: Sequence[Program], events: Sequence[Sequence[Event]]) -> Comparison:
    """One step of all ranks of a pipeline beside the simulation of its ``programs``, in which each pass takes what it
    takes at the median over the micro-batches of its stage."""
    ran = [{event.act: event for event in one if event.act.op in PASSES} for one in events]
    begin = min(event.ready for one in ran for event in one.values())
    simulated = simulate(programs, costs_of(ran, sum(len(program.stages) for program in programs)))
    passes = tuple(
        Timed(rank, span.act, event.stop - event.ready, event.stop - begin, span.stop)
        for rank, spans in enumerate(simulated.spans)
        for span in spans
        if span.act.op in PASSES
        for event in [ran[rank][span.act]]
    )
    return Comparison(passes, max(one.stop for one in passes), simulated.makespan)


def costs_of(ran: Sequence[Mapping[Act, Event]], stages: int) -> Costs:
    """The median times of passes. Of a backward pass that is nowhere split, all is that of the input's gradient."""
    times: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for one in ran:
        for act, event in one.items():
            times[act.op, act.stage].append(event.stop - event.ready)

    def of(*ops: Op) -> tuple[float, ...]:
        found = ([times[op, stage] for op in ops if (op, stage) in times] for stage in range(stages))
        return tuple(median(lists[0]) if lists else 0.0 for lists in found)

    none = (0.0,) * stages
    return Costs(of(Op.FORWARD), of(Op.INPUT_GRADIENT, Op.BACKWARD), of(Op.WEIGHT_GRADIENT), held=none, kept=none)
