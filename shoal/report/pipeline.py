"""A pipeline schedule as it is seen: the passes of all ranks on a clock, and what they say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from shoal.errors import ConfigError, nearest, setting
from shoal.layout import kinds
from shoal.pipeline.program import PASSES, Act, Op, Program, Programs, placement
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.list_schedule import list_schedule
from shoal.pipeline.simulate import Costs, Simulation, even, simulate
from shoal.pipeline.stream import STREAMS
from shoal.pipeline.versions import live_versions, versions_used

NAMES = tuple(name for name in kinds.SCHEDULES if name in SCHEDULES or name in STREAMS)
"""The schedules that can be seen, as a layout names them."""
_STEADY = 2
"""Steps of a stream that are shown between its beginning and its drain."""


class PassTimes(NamedTuple):
    """What a micro-batch takes on a whole rank, whichever unit, and a tensor from rank to rank. A backward pass takes
    as long as its two halves, for the input and for the weights."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    transfer: float = 0.0

    @classmethod
    def parse(cls, text: str) -> PassTimes:
        """Of ``F,I,W,C``. Raises :class:`~shoal.errors.ConfigError` where that is not what ``text`` is."""
        try:
            times = cls(*map(float, text.split(",")))
        except (ValueError, TypeError):
            times = None
        if times is None or text.count(",") != 3 or not all(0 <= time < 1e12 for time in times) or sum(times[:3]) <= 0:
            problem = "is not the times of a forward, an input-gradient and a weight-gradient pass and of a transfer"
            legal = "use four numbers from 0 to below 1e12, such as 1,1.2,0.8,0.1"
            raise ConfigError(setting("--times", text, problem, legal))
        return times


ALIKE = PassTimes()
"""F, I and W take the same, and moving on nothing: what the literature draws."""


class Bar(NamedTuple):
    """A pass and when it happens. ``chunk`` counts the stages of its rank; ``version`` is how many updates the weights
    have had that it uses, where several versions are alive, else 0."""

    act: Act
    start: float
    stop: float
    chunk: int
    version: int

    def in_words(self) -> str:
        return f"{self.act.in_words()}: {clock(self.start)} to {clock(self.stop)}"


@dataclass(frozen=True)
class Pipeline:
    """A schedule over so many ranks and micro-batches a step. All tuples are by rank but ``home`` and ``marks``."""

    name: str
    micro_batches: int
    times: PassTimes
    home: tuple[int, ...]
    """The rank of each stage."""
    bars: tuple[tuple[Bar, ...], ...]
    """Of a step; of a stream, of the steps in which it begins, two steady ones and the drain."""
    marks: tuple[tuple[float, str], ...]
    """When the parts of a stream begin on the first rank, and what they are."""
    makespan: float
    """The time of a step: in a stream, of a steady one."""
    work: float
    """Of that, what a rank has to do: the mean."""
    bubble_within: float
    peaks: tuple[float, ...]
    """The most micro-batches whose activations a rank holds at one moment; of a stage that is one of V, 1/V."""
    weight_versions: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.bars)

    @property
    def chunks(self) -> int:
        return len(self.home) // self.ranks

    def stages_at(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank."""
        return tuple(stage for stage, home in enumerate(self.home) if home == rank)

    @property
    def is_stream(self) -> bool:
        return bool(self.marks)

    @property
    def steps(self) -> int:
        """Of a stream, those that are shown; else none."""
        return len(self.marks[:-1])

    @cached_property
    def end(self) -> float:
        """When the last pass that is shown ends."""
        return max(bar.stop for one in self.bars for bar in one)

    @cached_property
    def shortest(self) -> float:
        """What the shortest pass takes that takes any time."""
        return min(bar.stop - bar.start for one in self.bars for bar in one if bar.stop > bar.start)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The kinds of passes that there are."""
        found = {bar.act.op for one in self.bars for bar in one}
        return tuple(op for op in Op if op in found)

    @cached_property
    def digits(self) -> int:
        """Of the longest number of a micro-batch."""
        return len(str(max(bar.act.micro_batch for one in self.bars for bar in one)))

    @property
    def bubble_per_work(self) -> float:
        return self.makespan / self.work - 1

    @property
    def bubble_share(self) -> float:
        return 1 - self.work / self.makespan

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints: ``peak_live``, ``weight_versions`` and ``timeline`` are by rank."""
        return {
            "schedule": self.name,
            "ranks": self.ranks,
            "micro_batches": self.micro_batches,
            "stages_per_rank": self.chunks,
            "rank_of_stage": list(self.home),
            "times": self.times._asdict(),
            "makespan": self.makespan,
            "work": self.work,
            "bubble": {"per_work": self.bubble_per_work, "share": self.bubble_share, "span": self.bubble_within},
            "peak_live": list(self.peaks),
            "weight_versions": list(self.weight_versions),
            "timeline": [[self._bar_as_json(bar) for bar in one] for one in self.bars],
        }

    def _bar_as_json(self, bar: Bar) -> dict[str, Any]:
        found = {"pass": bar.act.op.value, "stage": bar.act.stage, "micro_batch": bar.act.micro_batch,
                 "start": bar.start, "stop": bar.stop}  # fmt: skip
        return found | ({"weights": bar.version} if self.is_stream else {})


def pipeline(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int | None = None,
    times: PassTimes = ALIKE,
    memory: float | None = None,
) -> Pipeline:
    """The schedule ``name`` over ``ranks`` and ``micro_batches`` of a step, with ``chunks`` stages a rank: by default
    as many as the schedule has. ``memory`` is the most micro-batches that ``list`` has a rank hold. Raises
    :class:`~shoal.errors.ConfigError` for what it does not admit."""
    chunks = admitted(name, ranks, micro_batches, chunks, memory)
    costs = even(
        ranks,
        chunks,
        forward=times.forward,
        input_gradient=times.input_gradient,
        weight_gradient=times.weight_gradient,
        transfer=times.transfer,
    )
    if kinds.SCHEDULES[name].made_to_measure:
        programs = list_schedule(ranks, micro_batches, chunks, costs=costs, memory=memory)
    else:
        programs = shown_of(name, ranks, micro_batches, chunks)
    return on_the_clock(name, micro_batches, times, programs, costs)


def shown_of(name: str, ranks: int, micro_batches: int, chunks: int) -> Programs:
    """The passes that are shown of a schedule: of a step; of a stream, of the steps in which it begins, two steady ones
    and the drain."""
    if name in STREAMS:
        return STREAMS[name](ranks, micro_batches, _fill(ranks, micro_batches) + _STEADY)
    return SCHEDULES[name](ranks, micro_batches, chunks)


def on_the_clock(name: str, micro_batches: int, times: PassTimes, programs: Programs, costs: Costs) -> Pipeline:
    """The schedule's ``programs``, as :func:`shown_of` gives them, for ``costs`` whose memory is in micro-batches of a
    whole rank; ``times`` are what they come to for a rank."""
    ranks = len(programs)
    run = simulate(_passes(programs), costs)
    if name in STREAMS:
        return _of_stream(name, micro_batches, times, programs, run, _fill(ranks, micro_batches))
    bars = _bars(programs, run, [[0] * micro_batches] * ranks)
    return Pipeline(
        name, micro_batches, times, placement(programs), bars, (), run.makespan, run.work, run.bubble_within,
        run.peaks, run.weight_versions,
    )  # fmt: skip


def clock(time: float) -> str:
    """A time or an amount in as few digits as tell it."""
    time = round(time, 9) + 0.0  # nothing is not what rounding leaves, nor −0
    return f"{time:,.4g}" if abs(time) < 1e4 else f"{time:,.0f}"


def percent(share: float) -> str:
    return f"{round(share, 9) + 0.0:.1%}"


def admitted(name: str, ranks: int, micro_batches: int, chunks: int | None = None, memory: float | None = None) -> int:
    """The stages a rank of the schedule ``name``. Raises :class:`~shoal.errors.ConfigError` for what it does not
    admit."""
    stem, slash, number = name.partition("/")
    if slash and stem in NAMES and number.isdigit():
        problem = "that is how a layout says the stages a rank, which are -v here"
        raise ConfigError(setting("NAME", name, problem, f"use {stem} -v {number}"))
    if name not in NAMES:
        legal = f"use one of {', '.join(NAMES)}"
        raise ConfigError(setting("NAME", name, f"is not a schedule{nearest(name, NAMES)}", legal))
    own = kinds.SCHEDULES[name]
    if not own.admits(ranks, micro_batches):
        step, least = own.mb_step(ranks), own.mb_least(ranks)
        those = f"multiples of {step}" if step > 1 else f"at least {least}"
        legal = "use " + " or ".join(f"-m {number}" for number in own.nearest_mb(ranks, micro_batches))
        problem = f"{name} over {ranks} ranks admits {those} micro-batches"
        raise ConfigError(setting("-m", micro_batches, problem, legal))
    if chunks not in (None, own.chunks) and not own.any_chunks:
        free = [other for other in NAMES if kinds.SCHEDULES[other].any_chunks]
        problem = f"{name} has exactly {own.chunks} stage{'s' * (own.chunks > 1)} a rank"
        legal = f"leave it out, or use {', '.join(free[:-1])} or {free[-1]}, which take any number"
        raise ConfigError(setting("-v", chunks, problem, legal))
    if memory is not None and not own.made_to_measure:
        raise ConfigError(setting("--memory", memory, f"{name} has an order of its own", "leave it out, or use list"))
    if memory is not None and not 1 <= memory < 1e12:
        problem = "a rank holds one micro-batch at least, and fewer than 1e12"
        raise ConfigError(setting("--memory", memory, problem, "use --memory 1"))
    return chunks or own.chunks


def _fill(ranks: int, micro_batches: int) -> int:
    """The steps in which a stream begins: then the first rank goes backward, too, and before the drain there are as
    many versions as there ever will be."""
    return max(-(-ranks // micro_batches), -(-2 * ranks // micro_batches) - _STEADY)


def _passes(programs: Programs) -> Programs:
    return tuple(
        Program(one.stages, one.micro_batches, tuple(act for act in one.actions if act.op in PASSES))
        for one in programs
    )


def _bars(programs: Programs, run: Simulation, used: Sequence[Sequence[int]]) -> tuple[tuple[Bar, ...], ...]:
    """``used`` are the versions of the weights, by rank and micro-batch."""
    return tuple(
        tuple(Bar(*span, program.stages.index(span.act.stage), versions[span.act.micro_batch]) for span in spans)
        for program, spans, versions in zip(programs, run.spans, used, strict=True)
    )


def _of_stream(
    name: str, micro_batches: int, times: PassTimes, stream: Programs, run: Simulation, fill: int
) -> Pipeline:
    """``fill`` steps are those in which it begins."""
    bars = _bars(stream, run, [versions_used(one) for one in stream])
    begins = [
        [bar.start for bar in one if bar.act.op is Op.FORWARD and bar.act.micro_batch % micro_batches == 0]
        for one in bars
    ]
    period = max(one[-1] - one[-2] for one in begins)
    work = run.work / (fill + _STEADY)
    last = max(bar.stop for bar in bars[0] if bar.act.op is Op.FORWARD)
    parts = [f"step {step}" + (": begins" if step < fill else ": steady") for step in range(fill + _STEADY)]
    return Pipeline(
        name, micro_batches, times, placement(stream), bars, (*zip(begins[0], parts, strict=True), (last, "drain")),
        period, work, period - work, run.peaks, tuple(map(live_versions, stream)),
    )  # fmt: skip
