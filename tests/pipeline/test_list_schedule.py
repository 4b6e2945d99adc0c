from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.pipeline.faults import faults
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Programs, placement
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.list_schedule import list_schedule
from shoal.pipeline.simulate import Costs, even, simulate

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (1.0, 2.0, 1.0), (2.0, 1.0, 1.0), (1.0, 1.0, 2.0)]
CHUNKS = {"interleaved": 2, "breadth-first": 2, "zb-v": 2, "dualpipe-v": 2}
SHORT = {"forward": 1.0, "input_gradient": 1.5, "weight_gradient": 0.5}
"""Times of a language model, whose attention has a backward pass and no weights."""


def costs_of(ranks: int, chunks: int, times: tuple[float, float, float], transfer: float = 0.0) -> Costs:
    names = ("forward", "input_gradient", "weight_gradient")
    return even(ranks, chunks, transfer=transfer, **dict(zip(names, times, strict=True)))


@pytest.mark.parity
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "list"])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("ranks", "micro_batches", "transfer"), [(2, 4, 0.0), (3, 7, 0.0), (3, 6, 0.2)])
def test_it_is_as_fast_as_any_other_schedule_in_the_same_memory(
    name: str, times: tuple[float, float, float], ranks: int, micro_batches: int, transfer: float
) -> None:
    if name == "interleaved":
        micro_batches -= micro_batches % ranks
    chunks = CHUNKS.get(name, 1)
    costs = costs_of(ranks, chunks, times, transfer)
    other = simulate(SCHEDULES[name](ranks, micro_batches, chunks), costs)
    ours = simulate(list_schedule(ranks, micro_batches, chunks, costs=costs, memory=max(other.peaks)), costs)
    assert max(ours.peaks) <= max(other.peaks) + 1e-6
    assert ours.makespan <= other.makespan + 1e-6


def uneven(costs: Costs) -> Costs:
    """Every stage with times of its own, and more memory in the middle."""
    stages = range(len(costs.held))

    def vary(amounts: tuple[float, ...], step: int) -> tuple[float, ...]:
        return tuple(amount * (1 + 0.3 * (stage * step % 4)) for stage, amount in enumerate(amounts))

    return replace(
        costs,
        forward=vary(costs.forward, 1),
        input_gradient=vary(costs.input_gradient, 2),
        weight_gradient=vary(costs.weight_gradient, 3),
        held=tuple(held * (1.5 if 0 < stage < stages[-1] else 1.0) for stage, held in enumerate(costs.held)),
        kept=tuple(0.5 * kept for kept in costs.kept),
    )


@pytest.mark.parity
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "list"])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("ranks", "micro_batches", "transfer"), [(2, 5, 0.1), (3, 6, 0.0), (4, 8, 0.3)])
def test_it_is_as_fast_as_any_other_schedule_of_uneven_stages(
    name: str, times: tuple[float, float, float], ranks: int, micro_batches: int, transfer: float
) -> None:
    """Where it is free to place them, and where it is told on which rank each is."""
    if name == "interleaved":
        micro_batches -= micro_batches % ranks
    chunks = CHUNKS.get(name, 1)
    costs = uneven(costs_of(ranks, chunks, times, transfer))
    by_hand = SCHEDULES[name](ranks, micro_batches, chunks)
    other = simulate(by_hand, costs)
    for home in (None, placement(by_hand)):
        programs = list_schedule(ranks, micro_batches, chunks, costs=costs, memory=max(other.peaks), home=home)
        assert home in (None, placement(programs))
        ours = simulate(programs, costs)
        assert max(ours.peaks) <= max(other.peaks) + 1e-6
        assert ours.makespan <= other.makespan + 1e-6


@pytest.mark.parametrize(
    ("name", "by_hand", "by_list"),
    [("1f1b", 33, 30), ("zb-h1", 30, 30), ("zb-v", 27, 26.75), ("interleaved", 28.5, 25.75), ("dualpipe-v", 27.25, 26)],
)
def test_it_is_faster_where_weights_gradients_are_short(name: str, by_hand: float, by_list: float) -> None:
    chunks = CHUNKS.get(name, 1)
    costs = even(4, chunks, **SHORT)
    other = simulate(SCHEDULES[name](4, 8, chunks), costs)
    ours = simulate(list_schedule(4, 8, chunks, costs=costs, memory=max(other.peaks)), costs)
    assert (other.makespan, ours.makespan) == (by_hand, by_list)


@pytest.mark.parametrize(("chunks", "memory"), [(1, 1.0), (1, 2.0), (2, 1.0), (2, 1.5), (3, 1.0), (3, 2.0)])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_it_makes_do_with_any_memory_that_holds_a_micro_batch(chunks: int, memory: float, micro_batches: int) -> None:
    costs = even(3, chunks, kept=0.5)
    programs = list_schedule(3, micro_batches, chunks, costs=costs, memory=memory)
    assert faults(lower(programs)) == []
    assert max(simulate(programs, costs).peaks) <= memory + 1e-6
    less = list_schedule(3, micro_batches, chunks, costs=costs, memory=0.0)
    assert max(simulate(less, costs).peaks) <= 1 + 1e-6


def test_more_memory_takes_no_more_time() -> None:
    costs = even(3, 2, **SHORT, kept=0.5, transfer=0.1)
    times = [simulate(list_schedule(3, 6, 2, costs=costs, memory=cap), costs).makespan for cap in (1, 2, 3, 6)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_it_makes_the_best_of_uneven_stages() -> None:
    """The last stage takes twice as long: no rank can be faster than that one is busy, and its first input comes after
    three forward passes, its last gradient goes back through three."""
    costs = even(4)
    slow = [(*times[:3], 2 * times[3]) for times in (costs.forward, costs.input_gradient, costs.weight_gradient)]
    costs = replace(costs, forward=slow[0], input_gradient=slow[1], weight_gradient=slow[2])
    found = {name: simulate(SCHEDULES[name](4, 8, 1), costs).makespan for name in ("1f1b", "zb-h1", "zb-h2")}
    ours = simulate(list_schedule(4, 8, costs=costs), costs).makespan
    assert ours <= min(found["1f1b"], found["zb-h1"])
    assert 8 * 6 + 3 <= ours < found["1f1b"]


@pytest.mark.parametrize("home", [(0, 1, 0, 1), (0, 1, 1, 0)])
def test_stages_are_on_the_ranks_that_are_named(home: tuple[int, ...]) -> None:
    costs = uneven(even(2, 2, **SHORT))
    programs = list_schedule(2, 4, 2, costs=costs, home=home)
    assert placement(programs) == home
    assert faults(lower(programs)) == []
    free = simulate(list_schedule(2, 4, 2, costs=costs), costs).makespan
    assert simulate(programs, costs).makespan >= free - 1e-9


def test_it_always_finds_the_same() -> None:
    def make() -> Programs:
        return list_schedule(3, 7, 2, costs=even(3, 2, **SHORT, transfer=0.1))

    assert make() == make()
