"""Runs programs on a clock instead of on ranks: when each action happens, how long a step takes, what it holds.

The programs may be those of a schedule, passes alone, or whole ones, after :mod:`shoal.pipeline.lower`. Then a tensor
moves when it has been sent and there is room for it. A rank does one thing at a time; moving takes none of its time,
and neither do reductions, the norm and the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shoal.pipeline.program import DROP, PASSES, RECEIVE, SEND, Act, Op, Program, giver, named, placement, taker
from shoal.pipeline.turns import answer, awaited_by_passes, awaited_by_whole, in_turn, is_whole
from shoal.pipeline.versions import live_versions

_RECEIVES = set(RECEIVE.values())
_SENT = {dropped: sent for sent, dropped in DROP.items()}


@dataclass(frozen=True)
class Costs:
    """What the passes of a micro-batch take and hold, by stage, in any unit of time and any of memory.

    A backward pass takes as long as its two halves.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    held: tuple[float, ...]
    """From the start of the forward pass to the end of the backward or input-gradient pass; includes the input."""
    kept: tuple[float, ...]
    """Of that, until the end of the weight-gradient pass."""
    transfer: float = 0.0
    """The time from sending a tensor to having received it."""
    boundary: tuple[float, ...] = ()
    """The memory of the stage's output, as of its gradient, while it is between two passes: nothing where not given."""
    shared: tuple[float, ...] = ()
    """Of the stage's output, what ``held`` has, too: its backward pass needs its own output."""
    forward_peak: tuple[float, ...] = ()
    """The most memory within a forward pass, its input included, beyond what others hold: ``held`` where not given."""
    backward_peak: tuple[float, ...] = ()
    """The most within a backward pass beyond what there is when it begins, the gradient of its output included: where
    not given, what it makes."""
    input_gradient_peak: tuple[float, ...] = ()
    """Likewise within an input-gradient pass."""

    def time(self, act: Act) -> float:
        """What an action takes."""
        match act.op:
            case Op.FORWARD:
                return self.forward[act.stage]
            case Op.BACKWARD:
                return self.input_gradient[act.stage] + self.weight_gradient[act.stage]
            case Op.INPUT_GRADIENT:
                return self.input_gradient[act.stage]
            case Op.WEIGHT_GRADIENT:
                return self.weight_gradient[act.stage]
        return 0.0

    def within(self, act: Act) -> float | None:
        """The most memory that a pass adds while it runs (see ``forward_peak``); None where that is not known."""
        match act.op:
            case Op.FORWARD:
                peaks = self.forward_peak
            case Op.BACKWARD:
                peaks = self.backward_peak
            case Op.INPUT_GRADIENT:
                peaks = self.input_gradient_peak
            case _:
                return None
        return peaks[act.stage] if peaks else None

    def freed(self, act: Act) -> float:
        """What goes with the end of a pass, of what its forward pass began to hold."""
        match act.op:
            case Op.BACKWARD:
                return self.held[act.stage]
            case Op.INPUT_GRADIENT:
                return self.held[act.stage] - self.kept[act.stage]
            case Op.WEIGHT_GRADIENT:
                return self.kept[act.stage]
        return 0.0


def even(
    ranks: int,
    chunks: int = 1,
    *,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
    transfer: float = 0.0,
    kept: float = 1.0,
) -> Costs:
    """Stages that are all alike. The times are those of a micro-batch on a whole rank, of which each of its ``chunks``
    takes its share; the unit of memory is what a rank holds of one micro-batch, and ``kept`` the part of it that awaits
    the weights' gradients."""

    def share(amount: float) -> tuple[float, ...]:
        return (amount / chunks,) * (ranks * chunks)

    return Costs(share(forward), share(input_gradient), share(weight_gradient), share(1.0), share(kept), transfer)


class Span(NamedTuple):
    """When an action happens."""

    act: Act
    start: float
    stop: float


@dataclass(frozen=True)
class Simulation:
    """A step on the clock. All tuples but ``spans[rank]`` are by rank."""

    spans: tuple[tuple[Span, ...], ...]
    """Every action of each rank, in order. What waits starts when it has waited."""
    peaks: tuple[float, ...]
    """The most memory that was held at one moment."""
    weight_versions: tuple[int, ...]
    """The most versions of its weights that a rank has at one moment: one where every step drains."""

    @cached_property
    def makespan(self) -> float:
        """From the start of the first pass to the end of the last: a step that ends for all ranks together."""
        return max(one[-1].stop for one in self._passes) - min(one[0].start for one in self._passes)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that passes took."""
        return tuple(sum(span.stop - span.start for span in one) for one in self._passes)

    @property
    def idle(self) -> tuple[float, ...]:
        """The rest of the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def lengths(self) -> tuple[float, ...]:
        """From the start of a rank's first pass to the end of its last."""
        return tuple(one[-1].stop - one[0].start for one in self._passes)

    @property
    def work(self) -> float:
        """The mean over ranks of the time that passes took."""
        return sum(self.busy) / len(self.busy)

    @property
    def bubble_per_work(self) -> float:
        """Idle time for one unit of work: (p − 1)/m for 1F1B (Narayanan et al. 2021)."""
        return self.makespan / self.work - 1

    @property
    def bubble_share(self) -> float:
        """The share of the makespan that is idle (Huang et al. 2019, GPipe)."""
        return 1 - self.work / self.makespan

    @property
    def bubble_within(self) -> float:
        """The time, more than its work, that the rank takes which takes longest from its first pass to its last: all
        there is of a bubble if the next step may start on one rank while another ends this one (Qi et al. 2024)."""
        return max(self.lengths) - self.work

    @cached_property
    def _passes(self) -> list[list[Span]]:
        return [[span for span in one if span.act.op in PASSES] for one in self.spans]


def simulate(programs: Sequence[Program], costs: Costs) -> Simulation:
    """``programs`` are valid together: ranks that wait for each other have no time line."""
    home = placement(programs)
    whole = is_whole(programs)
    spans: list[list[Span]] = [[] for _ in programs]
    clocks = [0.0] * len(programs)
    stops: dict[Act, float] = {}

    def arrival(sent: Act, source: int) -> float:
        return max(stops[sent], stops[answer(sent, source)]) + costs.transfer

    for rank, act in in_turn(programs, (awaited_by_whole if whole else awaited_by_passes)(home)):
        start = clocks[rank]
        if act.op in _SENT:
            start = max(start, arrival(Act(_SENT[act.op], *act[1:]), rank))
        elif (source := giver(act, len(home))) and (peer := home[source.stage]) != rank:
            sent = Act(SEND[source.op], source.stage, source.micro_batch, rank)
            start = max(start, arrival(sent, peer) if whole else stops[source] + costs.transfer)
        clocks[rank] = stops[named(act)] = start + costs.time(act)
        spans[rank].append(Span(act, start, clocks[rank]))
    assert all(len(one) == len(program.actions) for one, program in zip(spans, programs, strict=True)), "deadlock"
    peaks = tuple(peak(programs, rank, costs) for rank in range(len(programs)))
    return Simulation(tuple(map(tuple, spans)), peaks, tuple(map(live_versions, programs)))


def peak(programs: Sequence[Program], rank: int, costs: Costs) -> float:
    """The most memory that ``rank`` holds at one moment. It follows from the order of its own actions, whenever they
    happen, and depends on the costs of its own stages and the ``boundary`` of those before them alone."""
    memory = _Memory(costs, placement(programs), rank, is_whole(programs))
    for act in programs[rank].actions:
        memory.go_through(act)
    return memory.peak


class _Memory:
    """What one rank holds in a training step."""

    def __init__(self, costs: Costs, home: Sequence[int], rank: int, whole: bool) -> None:
        self._costs, self._home, self._rank, self._whole = costs, home, rank, whole
        self._live = self.peak = 0.0

    def go_through(self, act: Act) -> None:
        costs = self._costs
        taken, made = self._between(act) if costs.boundary else (0.0, 0.0)
        within = costs.within(act)
        if act.op is Op.FORWARD:
            # An input that is taken in belongs to what the forward pass holds.
            self._reach((within or 0.0) - taken)
            self._add(costs.held[act.stage] - taken)
            self._add(made)
        elif within is not None:
            self._reach(within)
            self._live -= costs.freed(act) + taken
            self._add(made)
        else:
            self._add(made)
            self._live -= costs.freed(act) + taken

    def _between(self, act: Act) -> tuple[float, float]:
        """What an action takes of the tensors between two passes, and what it adds to them. They are there from being
        received to being taken in, and from being made to being dropped or, on the same rank, taken in."""
        if act.op in _SENT:
            return self._size(act), 0.0
        source, target = giver(act, len(self._home)), taker(act, len(self._home))
        taken = self._size(source) if source and self._sees(source) else 0.0
        makes = act.op in _RECEIVES or (target and self._sees(target))
        return taken, self._size(act) if makes else 0.0

    def _sees(self, other: Act) -> bool:
        """Whether what goes to or comes from another stage's pass is in the programs."""
        return self._whole or self._home[other.stage] == self._rank

    def _size(self, act: Act) -> float:
        """Of the output, or the gradient of the input, that an action of a stage makes or drops; of the input, or the
        gradient of the output, that it receives."""
        before = act.op in (Op.BACKWARD, Op.INPUT_GRADIENT, Op.DROP_GRADIENT, Op.RECEIVE_ACTIVATION)
        size = self._costs.boundary[act.stage - before]
        if self._costs.shared and act.op in (Op.FORWARD, Op.DROP_ACTIVATION) and self._home[act.stage] == self._rank:
            size -= self._costs.shared[act.stage]
        return size

    def _reach(self, more: float) -> None:
        """That much more is there for a moment."""
        self.peak = max(self.peak, self._live + more)

    def _add(self, amount: float) -> None:
        self._live += amount
        self._reach(0.0)
