"""What really ran: when each action began, had what it waited for, and ended; and how far that is from the simulation.

Times are seconds of the wall clock, which all processes of a machine share; between machines they agree as far as the
clocks do. They are what this process saw: a GPU may do later what was asked of it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from shoal.pipeline.program import PASSES, SEND, Act, Op, Program, Programs, giver, placement
from shoal.pipeline.simulate import Costs, simulate

_Step = TypeVar("_Step")


class Event(NamedTuple):
    """An action that ran. From ``waits`` until ``ready`` it waited for what it takes in; before, it may have done what
    needs none of that."""

    act: Act
    start: float
    waits: float
    ready: float
    stop: float

    @property
    def waited(self) -> float:
        return self.ready - self.waits

    @property
    def took(self) -> float:
        """The time without what it waited."""
        return self.stop - self.start - self.waited

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
        self.within: Callable[[Act], AbstractContextManager[None]] | None = None
        """What every action happens in, if there is something."""
        self._waits = self._ready = 0.0

    def around(self, perform: Callable[[Act], None]) -> Callable[[Act], None]:
        """``perform``, which now writes down a program, if this is on."""
        if (within := self.within) is not None:
            perform = _inside(within, perform)
        if not self.on:
            return perform
        events: list[Event] = []
        self.runs.append(events)

        def recorded(act: Act) -> None:
            start = self._waits = self._ready = time.time()
            perform(act)
            events.append(Event(act, start, self._waits, self._ready, time.time()))

        return recorded

    def waits(self) -> None:
        """The action under way has nothing left to do before it has what it waits for."""
        if self.on:
            self._waits = self._ready = time.time()

    def arrived(self) -> None:
        """The action under way has what it waited for."""
        if self.on:
            self._ready = time.time()


def _inside(
    within: Callable[[Act], AbstractContextManager[None]], perform: Callable[[Act], None]
) -> Callable[[Act], None]:
    def inside(act: Act) -> None:
        with within(act):
            perform(act)

    return inside


Runs = Sequence[Sequence[Event]]
"""What one rank ran: a list for each step."""


class Timed(NamedTuple):
    """A pass as it ran, and as the simulation has it. Seconds from the beginning of the step's first pass."""

    rank: int
    act: Act
    took: float
    stop: float
    expected: float

    @property
    def late(self) -> float:
        """How much later it ended than in the simulation."""
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


def programs_of(events: Sequence[Sequence[Event]]) -> Programs:
    """What a step of a pipeline was, from what its ranks ran: an order may have been made for the model."""

    def program(acts: tuple[Act, ...]) -> Program:
        stages = tuple(sorted({act.stage for act in acts if act.stage >= 0}))
        micro_batches = {act.micro_batch for act in acts if act.op is Op.FORWARD}
        return Program(stages, len(micro_batches), acts)

    return tuple(program(tuple(event.act for event in one)) for one in events)


def compare(programs: Sequence[Program], events: Sequence[Sequence[Event]]) -> Comparison:
    """One step of all ranks of a pipeline beside the simulation of its ``programs``, in which each pass takes what it
    takes on average over the micro-batches of its stage, a message what :func:`message` says, and nothing else takes
    time."""
    ran = [{event.act: event for event in one if event.act.op in PASSES} for one in events]
    begin = min(event.ready for one in ran for event in one.values())
    home = placement(programs)
    simulated = simulate(programs, pass_costs(chain.from_iterable(events), len(home), message(events, home) or 0.0))
    passes = tuple(
        Timed(rank, span.act, event.took, event.stop - begin, span.stop)
        for rank, spans in enumerate(simulated.spans)
        for span in spans
        if span.act.op in PASSES
        for event in [ran[rank][span.act]]
    )
    return Comparison(passes, max(one.stop for one in passes), simulated.makespan)


def typical(found: Iterable[_Step], length: Callable[[_Step], float]) -> _Step:
    """The one of median length; of two in the middle, the longer."""
    ordered = sorted(found, key=length)
    return ordered[len(ordered) // 2]


@dataclass(frozen=True)
class PassCosts(Costs):
    """Costs as they were measured: where a stage has whole backward passes, they need not take what two halves do."""

    whole: Mapping[int, float] = field(default_factory=dict)
    """By stage: the time of a backward pass that is not split."""

    def time(self, act: Act) -> float:
        if act.op is Op.BACKWARD and act.stage in self.whole:
            return self.whole[act.stage]
        return super().time(act)


def pass_costs(events: Iterable[Event], stages: int, transfer: float = 0.0) -> PassCosts:
    """The mean times of passes, in seconds; none of a pass that a stage has not. What they hold is not measured."""
    times: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for event in events:
        if event.act.op in PASSES:
            times[event.act.op, event.act.stage].append(event.took)

    def of(op: Op) -> tuple[float, ...]:
        return tuple(fmean(times.get((op, stage), (0.0,))) for stage in range(stages))

    whole = {stage: fmean(found) for (op, stage), found in times.items() if op is Op.BACKWARD}
    none = (0.0,) * stages
    return PassCosts(
        of(Op.FORWARD), of(Op.INPUT_GRADIENT), of(Op.WEIGHT_GRADIENT), none, none, transfer=transfer, whole=whole
    )


def message(events: Sequence[Iterable[Event]], home: Sequence[int]) -> float | None:
    """What a message takes on average, in seconds (:func:`transfers`); None where there is none to see."""
    found = list(transfers(events, home))
    return fmean(found) if found else None


def transfers(events: Sequence[Iterable[Event]], home: Sequence[int]) -> Iterator[float]:
    """From sending a tensor to having it, in seconds, of every message that a pass waited for when it was sent: what
    other messages took, nobody saw. ``events`` are by rank of the pipeline, ``home`` is the rank of each stage."""
    ran = [{event.act: event for event in one} for one in events]
    for rank, one in enumerate(ran):
        for act, event in one.items():
            if (source := giver(act, len(home))) and (peer := home[source.stage]) != rank:
                sent = ran[peer].get(Act(SEND[source.op], source.stage, source.micro_batch, rank))
                if sent and event.waits <= sent.start:
                    yield max(0.0, event.ready - sent.start)  # clocks of two machines may differ
