"""A step's length from the Program that the executor runs: the schedule's passes, timed.

The order of a schedule does not depend on what passes take, so it is written once, as arrays, and then timed for every
candidate. Long steps repeat themselves: from a few rounds on, each further round takes as long as the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from shoal.layout.kinds import SCHEDULES as KINDS
from shoal.pipeline.program import Act, Op, placement
from shoal.pipeline.schedules import SCHEDULES

_SIMULATED = 3
"""Rounds of as many micro-batches as there are ranks, after which steps repeat themselves."""
_KINDS = {Op.FORWARD: 0, Op.INPUT_GRADIENT: 1, Op.WEIGHT_GRADIENT: 2, Op.BACKWARD: 3}


class Order(NamedTuple):
    """The passes of all ranks, each after what it waits for. Costs are looked up at 4·stage + kind of pass."""

    ranks: int
    home: tuple[int, ...]
    """The rank of each stage."""
    steps: tuple[tuple[int, int, int, int], ...]
    """(rank, cost, the place of the pass it waits for or −1, whether that is another rank's)."""
    live: tuple[float, ...]
    """By rank: the most micro-batches whose activations it holds at once, a stage's counted as 1/chunks."""
    held: tuple[tuple[int, ...], ...]
    """By rank: at that moment, of each of its stages in order, how many."""


def admitted(schedule: str, ranks: int, count: int) -> bool:
    """Whether a schedule takes that many micro-batches."""
    return KINDS[schedule].admits(ranks, count)


@cache
def order(schedule: str, ranks: int, count: int, chunks: int) -> Order:
    """The schedule's passes for ``count`` micro-batches through ``ranks`` ranks of ``chunks`` stages each."""
    programs = SCHEDULES[schedule](ranks, count, chunks)
    home = placement(programs)
    queues = [_passes(program.actions, home, count) for program in programs]
    done = [-1] * (2 * len(home) * count)
    """By what a pass makes: its place among the steps."""
    steps: list[tuple[int, int, int, int]] = []
    reached, ready = [0] * ranks, list(range(ranks))
    waiting: dict[int, int] = {}
    while ready:
        rank = ready.pop()
        queue, at = queues[rank], reached[rank]
        while at < len(queue):
            cost, makes, takes, cross = queue[at]
            waits = done[takes] if takes >= 0 else -1
            if takes >= 0 and waits < 0:
                waiting[takes] = rank
                break
            if makes >= 0:
                done[makes] = len(steps)
                if makes in waiting:
                    ready.append(waiting.pop(makes))
            steps.append((rank, cost, waits, cross))
            at += 1
        reached[rank] = at
    assert all(at == len(queue) for at, queue in zip(reached, queues, strict=True)), "deadlock"
    live, held = [], []
    for program in programs:
        now = dict.fromkeys(program.stages, 0)
        most, then = 0, tuple(now.values())
        for act in program.actions:
            if act.op is Op.FORWARD:
                now[act.stage] += 1
                if (total := sum(now.values())) > most:
                    most, then = total, tuple(now.values())
            elif act.op is not Op.WEIGHT_GRADIENT:
                now[act.stage] -= 1
        live.append(most / max(1, len(program.stages)))
        held.append(then)
    return Order(ranks, home, tuple(steps), tuple(live), tuple(held))


def _passes(actions: Sequence[Act], home: Sequence[int], count: int) -> list[tuple[int, int, int, int]]:
    """(cost, what it makes, what it takes from the stage before or after, whether that is another rank's) of a rank's
    passes; what is made is counted by stage, direction and micro-batch, and −1 is nothing."""
    found, last = [], len(home) - 1
    for act in actions:
        kind, stage = _KINDS[act.op], act.stage
        makes, source = -1, -1
        if kind == 0:
            makes, source = 2 * stage * count + act.micro_batch, stage - 1
        elif kind != 2:
            makes, source = (2 * stage + 1) * count + act.micro_batch, stage + 1 if stage < last else -1
        takes = -1 if source < 0 else makes + 2 * (source - stage) * count
        cross = int(source >= 0 and home[source] != home[stage])
        found.append((4 * stage + kind, makes, takes, cross))
    return found


def rounds(schedule: str, ranks: int, count: int) -> int:
    """As many micro-batches as show how ``count`` of them go, and hold as much."""
    step = max(1, KINDS[schedule].mb_step(ranks))
    least = max(_SIMULATED * ranks, KINDS[schedule].mb_least(ranks))
    small = -(-least // step) * step + count % step
    return min(count, small + (count - small) % ranks) if small < count else count


@cache
def home(schedule: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage."""
    if ranks == 1:
        return (0,) * chunks
    return flight(schedule, ranks, 4 * ranks, chunks).home


def flight(schedule: str, ranks: int, count: int, chunks: int) -> Order:
    """The order of as few micro-batches as hold as much at once as ``count`` of them."""
    return order(schedule, ranks, rounds(schedule, ranks, count), chunks)


def length(
    schedule: str, ranks: int, count: int, chunks: int, costs: Sequence[Sequence[float]], transfer: float
) -> float:
    """How long all passes take. ``costs`` are, by stage, (forward, input gradient, weight gradient) of a micro-batch;
    ``transfer`` is what a tensor takes to the next rank."""
    flat = [x for forward, inputs, weights in costs for x in (forward, inputs, weights, inputs + weights)]
    if ranks == 1 and chunks == 1:
        return count * (flat[0] + flat[3])
    few = rounds(schedule, ranks, count)
    longer = _run(order(schedule, ranks, few, chunks), flat, transfer)
    if few == count:
        return longer
    fewer = few - ranks
    if fewer < 1 or not admitted(schedule, ranks, fewer):
        work = max(sum(flat[4 * s] + flat[4 * s + 3] for s in range(r, ranks * chunks, ranks)) for r in range(ranks))
        return longer + (count - few) * work
    shorter = _run(order(schedule, ranks, fewer, chunks), flat, transfer)
    return longer + (count - few) * (longer - shorter) / ranks


def _run(order: Order, costs: Sequence[float], transfer: float) -> float:
    clocks = [0.0] * order.ranks
    stops: list[float] = []
    push = stops.append
    for rank, cost, waits, cross in order.steps:
        start = clocks[rank]
        if waits >= 0:
            ready = stops[waits] + transfer if cross else stops[waits]
            if ready > start:
                start = ready
        start += costs[cost]
        clocks[rank] = start
        push(start)
    return max(clocks)
