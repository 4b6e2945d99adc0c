"""The steps of a trace that are there as a whole, and what a simulation has for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import inf

from shoal.pipeline.faults import faults
from shoal.pipeline.lower import lower
from shoal.pipeline.program import PASSES, Act, Op, Program
from shoal.pipeline.simulate import Costs, Simulation, simulate
from shoal.pipeline.stream import STREAMS
from shoal.pipeline.trace import Event, programs_of
from shoal.pipeline.trace_file import Trace

_SETTLED = 3
"""Steps of a simulated stream, after those in which it fills, in which it comes to repeat itself."""

ByRank = Sequence[Sequence[Event]]


class Counted(Act):
    """An action whose micro-batch, or the first of its batch, is counted from that of a step: −1 is the one before, and
    not all of them."""

    @property
    def _has_number(self) -> bool:
        return True


@dataclass(frozen=True)
class Step:
    """A step of a pipeline between two moments; all times in seconds.

    Of a synchronous schedule it is from where its first pass begins to work until its last has ended. A step of a
    stream has no end: it is from where its first micro-batch enters the pipeline to where that of the next does.
    """

    number: int
    begin: float
    end: float
    events: ByRank
    """All that may be between the two moments."""
    own: ByRank
    """What belongs to the step: in a stream, other ranks do some of it later."""
    until: float = inf
    """When the next step has begun. A synchronous one goes on after its passes, with norm and update."""
    first: int | None = None
    """The number of its first micro-batch, where the events count from the beginning of a stream."""

    @property
    def length(self) -> float:
        return self.end - self.begin

    def counted(self, act: Act) -> Act:
        """An action by the number of its micro-batch in the step."""
        return act if self.first is None else Counted(act.op, act.stage, act.micro_batch - self.first, act.peer)


def is_stream(trace: Trace) -> bool:
    """Whether steps overlap."""
    return trace.schedule in STREAMS


def whole_steps(trace: Trace, ranks: Sequence[int]) -> Iterator[Step]:
    """Those of the pipeline of ``ranks``."""
    runs = [trace.runs[rank] for rank in ranks]
    if is_stream(trace):
        yield from _steady(trace, runs)
        return
    for number, events in zip(trace.steps, zip(*runs, strict=True), strict=True):
        if not faults(programs_of(events)):
            yield _drained(number, events)


def began_anew(trace: Trace, ranks: Sequence[int]) -> bool:
    """Whether there was a drain between two of the steps of a stream."""
    firsts = [_first(run) for run in trace.runs[ranks[0]]]
    return any(following != first + trace.micro_batches for first, following in pairwise(firsts))


def simulated(trace: Trace, programs: Sequence[Program], costs: Costs) -> Step:
    """A step of ``programs``; where steps overlap, one of a stream that has been full for some time."""
    if not is_stream(trace):
        return _drained(0, _as_events(simulate(programs, costs)))
    ranks, m = len(programs), trace.micro_batches
    step = -(-2 * ranks // m) + _SETTLED
    events = _as_events(simulate(lower(STREAMS[trace.schedule](ranks, m, step + 2)), costs))
    return _between(step, events, events, step * m, m)


def _drained(number: int, events: ByRank) -> Step:
    events = _agreeing(events)
    passes = [event for event in chain.from_iterable(events) if event.act.op in PASSES]
    return Step(number, min(event.ready for event in passes), max(event.stop for event in passes), events, events)


def _agreeing(events: ByRank) -> ByRank:
    """No rank has the norm before the last of them has come to it, which is what the others wait for."""
    last = max(event.start for event in chain.from_iterable(events) if event.act.op is Op.NORM)

    def waiting(event: Event) -> Event:
        return event._replace(ready=max(event.start, last), stop=max(event.stop, last))

    return [[waiting(event) if event.act.op is Op.NORM else event for event in one] for one in events]


def _steady(trace: Trace, runs: Sequence[Sequence[Sequence[Event]]]) -> Iterator[Step]:
    """The steps of a stream that is full, throughout which every rank was recorded."""
    m = trace.micro_batches
    firsts = [_first(run) for run in runs[0]]
    for at, (first, following) in enumerate(pairwise(firsts)):
        if first < len(runs) - 1 or following != first + m:
            continue
        since = at
        while since > 0 and firsts[since - 1] == firsts[since] - m:  # else the stream began anew between the two
            since -= 1
        events = [list(chain.from_iterable(of_rank[since : at + 2])) for of_rank in runs]
        step = _between(trace.first + at, events, [of_rank[at] for of_rank in runs], first, m)
        if all(one[0].start <= step.begin and step.end <= one[-1].stop for one in events):
            yield step


def _between(number: int, events: ByRank, own: ByRank, first: int, micro_batches: int) -> Step:
    """From where one micro-batch enters the pipeline to where the first of the next step does."""
    begin, end = (
        next((event.ready for event in events[0] if event.act[:3] == (Op.FORWARD, 0, micro_batch)), inf)
        for micro_batch in (first, first + micro_batches)
    )
    return Step(number, begin, end, events, own, until=end, first=first)


def _first(run: Sequence[Event]) -> int:
    """The first micro-batch of a step of a stream."""
    return next((event.act.micro_batch for event in run if event.act.op is Op.BEGIN), -1)


def _as_events(run: Simulation) -> list[list[Event]]:
    """A simulated action waits from where the one before it on its rank has ended."""
    return [
        [
            Event(span.act, before, before, span.start, span.stop)
            for before, span in zip((0.0, *(span.stop for span in spans[:-1])), spans, strict=True)
        ]
        for spans in run.spans
    ]
