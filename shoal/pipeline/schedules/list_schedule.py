"""List scheduling: an order made for measured times and a limit of memory (after the heuristic of Qi et al. 2024,
2401.10241, section 3.1, for any stages a rank and any times)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from operator import itemgetter
from typing import NamedTuple

from shoal.pipeline.program import Act, Op, Program, Programs, placement
from shoal.pipeline.schedules.breadth_first import breadth_first
from shoal.pipeline.schedules.dualpipe_v import dualpipe_v
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.interleaved import interleaved
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.pipeline.schedules.zb_h1 import zb_h1
from shoal.pipeline.schedules.zb_h2 import zb_h2
from shoal.pipeline.schedules.zb_v import zb_v
from shoal.pipeline.simulate import Costs, even, simulate

_SLACK = 1e-9  # sums of the same amounts in another order are the same
_FILLS = (False, True)


def list_schedule(
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    costs: Costs | None = None,
    memory: float | None = None,
    home: Sequence[int] | None = None,
) -> Programs:
    """The order with the shortest makespan, and of several such the one that holds least, among those that hold at most
    ``memory`` on any rank, in the unit of ``costs``: the other schedules, the same with their weight-gradient passes
    moved to where they cost least, and what list scheduling makes by several rules.

    Stages go round the ranks or, where there are two a rank or more, up and down them, whichever is faster, unless
    ``home`` says on which rank each is. Without ``costs`` all stages are alike, and F, I and W take the same time.
    Without ``memory`` there is what 1F1B needs: ``ranks`` micro-batches on the rank where they hold most; there is
    always what one micro-batch needs. Any number of micro-batches will do.
    """
    costs = _in_thirds(costs, ranks) if costs else even(ranks, chunks)
    stages = range(ranks * chunks)
    around = tuple(stage % ranks for stage in stages)
    up_and_down = tuple(min(turn := stage % (2 * ranks), 2 * ranks - 1 - turn) for stage in stages)
    best, found = (inf, inf), Programs()
    for place in dict.fromkeys((around, up_and_down)) if home is None else (tuple(home),):
        each = [sum(costs.held[stage] for stage in stages if place[stage] == rank) for rank in range(ranks)]
        limit = max(*each, ranks * max(each) if memory is None else memory) + _SLACK
        for programs in _candidates(place, micro_batches, costs, limit):
            run = simulate(programs, costs)
            value = round(run.makespan, 9), round(max(run.peaks), 9)
            if value < best:
                best, found = value, programs
    return found


def _in_thirds(costs: Costs, ranks: int) -> Costs:
    """With times such that a rank takes 3 for a micro-batch, on average, whichever unit they are in."""
    passes = (costs.forward, costs.input_gradient, costs.weight_gradient)
    unit = sum(map(sum, passes)) / (3 * ranks)
    forward, input_gradient, weight_gradient = (tuple(time / unit for time in times) for times in passes)
    return replace(
        costs,
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        transfer=costs.transfer / unit,
    )


def _candidates(home: Sequence[int], micro_batches: int, costs: Costs, limit: float) -> Iterator[Programs]:
    """Orders that hold no more than ``limit``."""
    for programs in _by_hand(home, micro_batches):
        if max(simulate(programs, costs).peaks) <= limit:
            yield programs
            for fill in _FILLS:
                yield _Refined(home, micro_batches, costs, limit, fill, programs).write()
    for fill, patience, lead in product(_FILLS, (0.0, 0.5, 1.0), (2, micro_batches)):
        yield _Free(home, micro_batches, costs, limit, fill, patience, lead).write()


def _by_hand(home: Sequence[int], micro_batches: int) -> Iterator[Programs]:
    """The other schedules over the same stages."""
    ranks = max(home) + 1
    chunks = len(home) // ranks
    found: list[Programs] = []
    if chunks == 1:
        found += [schedule(ranks, micro_batches) for schedule in (one_f_one_b, zb_h1, zb_h2, gpipe)]
        found.append(one_f_one_b(ranks, micro_batches, overlap=True))
    else:
        found.append(breadth_first(ranks, micro_batches, chunks))
        if micro_batches % ranks == 0:
            found.append(interleaved(ranks, micro_batches, chunks))
    if chunks == 2:
        found.append(zb_v(ranks, micro_batches))
        if micro_batches >= 2 * ranks:
            found.append(dualpipe_v(ranks, micro_batches))
    return (programs for programs in found if placement(programs) == home)


class _Choice(NamedTuple):
    start: float
    act: Act


class _List:
    """Orders of all ranks, written in the order of time: the pass that can start first comes next.

    A rank puts weight-gradient passes off until it would idle for as long as one takes, or, with ``fill``, for any time
    at all, or until it has no room left.
    """

    def __init__(self, home: Sequence[int], micro_batches: int, costs: Costs, limit: float, fill: bool) -> None:
        ranks = max(home) + 1
        self._home, self._micro_batches, self._costs, self._limit, self._fill = home, micro_batches, costs, limit, fill
        self._stages = [[stage for stage, rank in enumerate(home) if rank == r] for r in range(ranks)]
        self._orders: list[list[Act]] = [[] for _ in range(ranks)]
        self._clocks, self._live = [0.0] * ranks, [0.0] * ranks
        self._forward: list[list[float]] = [[] for _ in home]
        """By stage: when its forward passes end, in order of micro-batches."""
        self._backward: list[list[float]] = [[] for _ in home]
        self._weights: list[deque[Act]] = [deque() for _ in range(ranks)]
        """By rank: its weight-gradient passes to come."""

    def write(self) -> Programs:
        choices = {rank: choice for rank in range(len(self._orders)) if (choice := self._choose(rank))}
        while choices:
            rank = min(choices, key=lambda one: (choices[one].start, one))
            stage = choices[rank].act.stage
            self._perform(rank, *choices[rank])
            for one in {self._home[beside] for beside in range(max(stage - 1, 0), min(stage + 2, len(self._home)))}:
                if choice := self._choose(one):
                    choices[one] = choice
                else:
                    choices.pop(one, None)
        return tuple(
            Program(tuple(stages), self._micro_batches, tuple(order))
            for stages, order in zip(self._stages, self._orders, strict=True)
        )

    def _perform(self, rank: int, start: float, act: Act) -> None:
        stop = start + self._costs.time(act)
        self._clocks[rank] = stop
        self._orders[rank].append(act)
        self._live[rank] += self._costs.held[act.stage] if act.op is Op.FORWARD else -self._costs.freed(act)
        if act.op is Op.FORWARD:
            self._forward[act.stage].append(stop)
        elif act.op is Op.INPUT_GRADIENT:
            self._backward[act.stage].append(stop)
            self._weights[rank].append(act._replace(op=Op.WEIGHT_GRADIENT))
        else:
            self._weights[rank].popleft()

    def _choose(self, rank: int) -> _Choice | None:
        """What a rank does next; None while there is nothing that it could."""
        best, full = self._prefer(rank)
        clock, weights = self._clocks[rank], self._weights[rank]
        if weights:
            gap = best.start - clock if best else inf
            enough = 0.0 if full or self._fill else self._costs.weight_gradient[weights[0].stage] - _SLACK
            if gap > _SLACK and gap >= enough:
                return _Choice(clock, weights[0])
        return best

    def _prefer(self, rank: int) -> tuple[_Choice | None, bool]:
        """The next forward or input-gradient pass of a rank, if there is one, and whether it lacks room for another."""
        raise NotImplementedError

    def _next_backward(self, stage: int) -> _Choice | None:
        """The input-gradient pass that comes next on a stage, once it is known when it can start."""
        last = len(self._home) - 1
        number = len(self._backward[stage])
        given = self._forward[stage] if stage == last else self._backward[stage + 1]
        if number == len(given):
            return None
        return self._at(given[number], min(stage + 1, last), Act(Op.INPUT_GRADIENT, stage, number))

    def _next_forward(self, stage: int) -> _Choice | None:
        number = len(self._forward[stage])
        if number == (len(self._forward[stage - 1]) if stage else self._micro_batches):
            return None
        given = self._forward[stage - 1][number] if stage else 0.0
        return self._at(given, max(stage - 1, 0), Act(Op.FORWARD, stage, number))

    def _at(self, given: float, giver: int, act: Act) -> _Choice:
        rank = self._home[act.stage]
        moves = self._costs.transfer if self._home[giver] != rank else 0.0
        return _Choice(max(self._clocks[rank], given + moves), act)


class _Refined(_List):
    """The forward and backward passes of given programs, in their order; weights' gradients are free."""

    def __init__(
        self, home: Sequence[int], micro_batches: int, costs: Costs, limit: float, fill: bool, given: Programs
    ) -> None:
        super().__init__(home, micro_batches, costs, limit, fill)
        self._given = [deque(act for act in program.actions if act.op is not Op.WEIGHT_GRADIENT) for program in given]

    def _perform(self, rank: int, start: float, act: Act) -> None:
        super()._perform(rank, start, act)
        if act.op is not Op.WEIGHT_GRADIENT:
            self._given[rank].popleft()

    def _prefer(self, rank: int) -> tuple[_Choice | None, bool]:
        if not self._given[rank]:
            return None, False
        op, stage, *_ = self._given[rank][0]
        if op is not Op.FORWARD:
            return self._next_backward(stage), False
        full = self._live[rank] + self._costs.held[stage] > self._limit
        return None if full else self._next_forward(stage), full


class _Free(_List):
    """Whatever can start first, and at once rather backward than forward, and rather on a later stage.

    A rank idles for up to ``patience`` forward passes so that a backward pass can come first, and no stage is further
    ahead of the next than by ``lead`` forward passes.
    """

    def __init__(
        self,
        home: Sequence[int],
        micro_batches: int,
        costs: Costs,
        limit: float,
        fill: bool,
        patience: float,
        lead: int,
    ) -> None:
        super().__init__(home, micro_batches, costs, limit, fill)
        self._patience, self._lead = patience, lead
        later = ([costs.held[other] for other in self._stages[rank] if other >= at] for at, rank in enumerate(home))
        self._room = [sum(held) for held in later]
        """By stage: the memory without which it takes no micro-batch forward. That leaves some for the rank's later
        stages, so that whatever is furthest on its way can go on to its end."""

    def _prefer(self, rank: int) -> tuple[_Choice | None, bool]:
        later_first = self._stages[rank][::-1]
        ready = [choice for stage in later_first if (choice := self._next_backward(stage))]
        backward = min(ready, default=None, key=itemgetter(0))
        fits = [stage for stage in later_first if self._live[rank] + self._room[stage] <= self._limit]
        open_ = [choice for stage in fits if not self._leads(stage) and (choice := self._next_forward(stage))]
        forward = min(open_, default=None, key=itemgetter(0))
        full = any(self._next_forward(stage) for stage in later_first if stage not in fits)
        if forward and backward:
            waits = backward.start - self._patience * self._costs.forward[forward.act.stage]
            return (forward if forward.start < waits else backward), full
        return forward or backward, full

    def _leads(self, stage: int) -> bool:
        last = stage == len(self._home) - 1
        return not last and len(self._forward[stage]) - len(self._forward[stage + 1]) >= self._lead
