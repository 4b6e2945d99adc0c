"""What a step really took, laid over the simulation of the same program with the same times of passes.

All times are in milliseconds from the beginning of what is shown. Of a synchronous schedule that is a step, from where
its first pass begins to work, and the length of a step is the time until its last pass has ended. An asynchronous one
has no such end: it is what all ranks do from the first forward pass of a step on the first rank to that of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

from shoal.errors import ConfigError, setting
from shoal.layout import Layout
from shoal.pipeline.program import DROP, PASSES, Act, Op, placement
from shoal.pipeline.trace import Event, message, pass_costs, programs_of, typical
from shoal.pipeline.trace_file import Trace, lag_of, steps_traced
from shoal.report.overlay_steps import Step, began_anew, is_stream, simulated, whole_steps

_DROPS = set(DROP.values())
_MS = 1e3


class Slice(NamedTuple):
    """An action. Just before its ``start``, its rank ``waited`` for another one, and had worked at it for so long
    ``before`` that."""

    act: Act
    start: float
    stop: float
    waited: float
    before: float = 0.0

    @property
    def took(self) -> float:
        return self.before + self.stop - self.start


@dataclass(frozen=True)
class Course:
    """What all ranks of a pipeline did, or would have done, in a step of so much ``length``."""

    lanes: tuple[tuple[Slice, ...], ...]
    length: float

    @property
    def end(self) -> float:
        """When the last action has ended: after a synchronous step, those that follow its passes."""
        return max(one.stop for lane in self.lanes for one in lane)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """By rank: the share of the length in which it works on a pass."""
        return tuple(sum(one.took for one in lane if one.act.op in PASSES) / self.length for lane in self.lanes)

    @cached_property
    def waiting(self) -> tuple[float, ...]:
        """By rank: the share of the length in which it waits for another rank."""
        return tuple(
            sum(max(min(one.start, self.length) - one.start + one.waited, 0.0) for one in lane) / self.length
            for lane in self.lanes
        )

    @property
    def rest(self) -> tuple[float, ...]:
        """By rank: the share of the length in which it does something else, such as to send, reduce or update."""
        return tuple(1 - busy - waiting for busy, waiting in zip(self.busy, self.waiting, strict=True))

    @property
    def bubble_share(self) -> float:
        """The share of the length in which no pass runs, on average over ranks."""
        return 1 - fmean(self.busy)

    @property
    def bubble_per_work(self) -> float:
        """Such time for one unit of work."""
        return 1 / fmean(self.busy) - 1


class Wait(NamedTuple):
    """How long a rank waited to begin an action, and how long it would have waited in the simulation."""

    rank: int
    act: Act
    measured: float
    simulated: float

    @property
    def beyond(self) -> float:
        """How much longer it was."""
        return self.measured - self.simulated


@dataclass(frozen=True)
class Overlay:
    """One step of a pipeline, as it ran and as it is simulated. Lanes are by rank of the pipeline."""

    trace: Trace
    step: int
    ranks: tuple[int, ...]
    """The pipeline's, as the run counts them."""
    stages: tuple[tuple[int, ...], ...]
    """Of each rank."""
    times: tuple[dict[Op, float], ...]
    """By stage: the mean time, in this step, of each kind of pass that it has."""
    transfer: float | None
    """The mean time of a message; None where no rank was waiting for one when it was sent."""
    measured: Course
    simulated: Course

    @property
    def is_stream(self) -> bool:
        return is_stream(self.trace)

    @property
    def ratio(self) -> float:
        return self.measured.length / self.simulated.length

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The kinds of passes that there are."""
        return tuple(op for op in Op if any(op in times for times in self.times))

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """The longest first."""
        found = []
        for rank, ran, imagined in zip(self.ranks, self.measured.lanes, self.simulated.lanes, strict=True):
            expected = {one.act: one.waited for one in imagined}
            found += [Wait(rank, one.act, one.waited, expected.get(one.act, 0.0)) for one in ran if one.waited > 0]
        return tuple(sorted(found, key=lambda wait: -wait.measured))

    @property
    def surprises(self) -> tuple[Wait, ...]:
        """The waits that were longer than in the simulation, those first that were so the most."""
        return tuple(sorted((wait for wait in self.waits if wait.beyond > 0), key=lambda wait: -wait.beyond))

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints. Lists are by rank, but ``passes_ms``, which is by stage."""
        both = {"measured": self.measured, "simulated": self.simulated}
        return {
            "layout": self.trace.layout,
            "schedule": self.trace.schedule,
            "micro_batches": self.trace.micro_batches,
            "step": self.step,
            "steps": list(self.trace.steps),
            "ranks": list(self.ranks),
            "stages": [list(one) for one in self.stages],
            "passes_ms": [{op.value: time for op, time in times.items()} for times in self.times],
            "transfer_ms": self.transfer,
            "step_ms": {name: one.length for name, one in both.items()},
            "ratio": self.ratio,
            "whole_step_ms": None if self.is_stream else self.measured.end,
            "bubble": {
                name: {"per_work": one.bubble_per_work, "share": one.bubble_share} for name, one in both.items()
            },
            "busy": {name: list(one.busy) for name, one in both.items()},
            "waiting": {name: list(one.waiting) for name, one in both.items()},
            "waits": [
                {
                    "rank": wait.rank,
                    "action": str(wait.act),
                    "what": wait.act.in_words(),
                    "ms": wait.measured,
                    "simulated_ms": wait.simulated,
                }
                for wait in self.waits
            ],
            "timeline": {
                name: [
                    [{"action": str(one.act), **{name: getattr(one, name) for name in one._fields[1:]}} for one in lane]
                    for lane in course.lanes
                ]
                for name, course in both.items()
            },
        }


def overlay(trace: Trace, step: int | None = None, rank: int = 0) -> Overlay:
    """A step of the pipeline in which ``rank`` is: number ``step``, or else the one of median length.

    Raises :class:`~shoal.errors.ConfigError` where the trace has no such rank or no such step as a whole.
    """
    ranks = next((pipeline for pipeline in trace.pipelines if rank in pipeline), None)
    if ranks is None:
        raise ConfigError(setting("--rank", rank, f"the trace is of {len(trace.runs)} ranks", "use --rank 0"))
    found = _chosen(trace, ranks, step)
    programs = programs_of(found.own)
    home = placement(programs)
    transfer = message(found.events, home)
    costs = pass_costs(chain.from_iterable(found.own), len(home), transfer or 0.0)
    kinds = {(act.op, act.stage) for program in programs for act in program.actions if act.op in PASSES}
    return Overlay(
        trace,
        found.number,
        ranks,
        tuple(program.stages for program in programs),
        tuple(
            {op: _MS * costs.time(Act(op, stage)) for op in Op if (op, stage) in kinds} for stage in range(len(home))
        ),
        None if transfer is None else _MS * transfer,
        _course(found),
        _course(simulated(trace, programs, costs)),
    )


def _chosen(trace: Trace, ranks: Sequence[int], step: int | None) -> Step:
    whole = {one.number: one for one in whole_steps(trace, ranks)}
    if not whole:
        raise ConfigError(setting("TRACE", f"a trace of {trace.layout}", *_none_whole(trace, ranks)))
    if step is None:
        return typical(whole.values(), lambda one: one.length)
    if step not in whole:
        numbers = ", ".join(map(str, whole))
        nearest = min(whole, key=lambda one: abs(one - step))
        raise ConfigError(setting("--step", step, f"the whole steps of the trace are {numbers}", f"use {nearest}"))
    return whole[step]


def _none_whole(trace: Trace, ranks: Sequence[int]) -> tuple[str, str]:
    """Why, and what to do about it."""
    again = "write another with shoal train RUN.toml --trace"
    if not is_stream(trace):
        return "none of its steps is whole", again
    layout = Layout.parse(trace.layout)
    takes = f"that takes {2 + lag_of(layout)} in a row"
    if began_anew(trace, ranks):
        problem = f"none of its steps is whole: {takes} without a drain"
        return problem, f"{again} --set evaluation.every=0 --set checkpoint.every=0"
    problem = f"with {len(trace.steps)} steps it is too short for a whole one of {len(ranks)} ranks: {takes}"
    return problem, f"{again}, where {steps_traced(layout).stop} steps are left to make"


def _course(step: Step) -> Course:
    return Course(tuple(tuple(_slices(step, events)) for events in step.events), _MS * step.length)


def _slices(step: Step, events: Sequence[Event]) -> Iterator[Slice]:
    for act, start, waits, ready, stop in events:
        if stop > step.begin and start < step.until:
            done = stop if act.op in _DROPS else ready  # a drop does nothing but wait
            at, since, begun, ended = (
                _MS * (min(max(time, step.begin), step.until) - step.begin) for time in (start, waits, done, stop)
            )
            yield Slice(step.counted(act), begun, ended, begun - since, since - at)
