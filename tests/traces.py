"""Traces that were never run: what a simulation says, written down as if it had happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.layout import Layout
from shoal.pipeline.lower import lower
from shoal.pipeline.program import STARTS, Act, Op, Program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulate import Costs, simulate
from shoal.pipeline.stream import STREAMS
from shoal.pipeline.trace import Event
from shoal.pipeline.trace_file import Trace, steps_traced

EPOCH = 1000.0
SETTLED = 6
"""Steps in which a stream comes to repeat itself, after those in which it fills."""


@dataclass(frozen=True)
class Slow(Costs):
    """Costs, and what some actions take besides, in seconds."""

    more: Callable[[Act], float] = lambda _: 0.0

    def time(self, act: Act) -> float:
        return super().time(act) + self.more(act)


def costs(layout: Layout, more: Callable[[Act], float] = lambda _: 0.0, transfer: float = 0.0) -> Slow:
    """Uneven stages; F, I and W of the first take 10, 12 and 8 ms on a whole rank, the last 1.5 times as long."""
    n = layout.stages
    shares = [(1.0 + 0.5 * stage / max(n - 1, 1)) / layout.chunks for stage in range(n)]
    passes = (tuple(time * share for share in shares) for time in (0.010, 0.012, 0.008))
    return Slow(*passes, held=(0.0,) * n, kept=(0.0,) * n, transfer=transfer, more=more)


def ran(programs: Sequence[Program], taking: Costs, begin: float) -> list[list[Event]]:
    """By rank: each action waits from where the one before it has ended."""
    return [
        [
            Event(act, begin + before, begin + before, begin + start, begin + stop)
            for before, (act, start, stop) in zip([0.0, *(span.stop for span in spans)], spans, strict=False)
        ]
        for spans in simulate(programs, taking).spans
    ]


def made_up(line: str, transfer: float = 0.0, more: Callable[[int, Act], float] = lambda _, act: 0.0) -> Trace:
    """The steps that are traced, from number 3 on, under a layout of one pipeline. ``more(step, act)`` is what an
    action takes beyond what it takes in every step; in a stream steps are not told apart: it gets −1."""
    layout = Layout.parse(line)
    name, p, m = layout.schedule, layout.pp, layout.mb
    runs: list[list[list[Event]]] = [[] for _ in range(p)]
    steps = len(steps_traced(layout))
    if name in STREAMS:
        taking = costs(layout, lambda act: more(-1, act), transfer)
        first = SETTLED + -(-2 * p // m)
        for rank, events in enumerate(ran(lower(STREAMS[name](p, m, first + steps + 1)), taking, EPOCH)):
            starts = [at for at, event in enumerate(events) if event.act.op in STARTS]
            runs[rank] = [events[start:stop] for start, stop in pairwise(starts[first : first + steps + 1])]
    else:
        programs = lower(SCHEDULES[name](p, m, layout.chunks))
        for step in range(steps):
            taking = costs(layout, lambda act, step=step: more(3 + step, act), transfer)  # type: ignore[misc]
            for rank, events in enumerate(ran(programs, taking, EPOCH + step)):
                runs[rank].append(events)
    return Trace(line, name, m, (tuple(range(p)),), 3, tuple(runs))


def late(act: Act, op: Op, stage: int, micro_batch: int, by: float) -> float:
    """``by`` for one action, nothing for others."""
    return by if act[:3] == (op, stage, micro_batch) else 0.0
