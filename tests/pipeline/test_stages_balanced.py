"""Stages cut by measured costs, beside every cut there is."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest

from shoal.errors import LayoutError
from shoal.pipeline.layer_costs import LayerCosts, by_stage
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Programs
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulate import Costs, peak, simulate
from shoal.pipeline.stages import balanced

LAYERS = 8


def drawn(seed: int) -> LayerCosts:
    """Of layers that differ in everything."""
    draw = random.Random(seed)

    def amounts(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randint(least, most) for _ in range(LAYERS))

    return LayerCosts(
        amounts(1, 9),
        amounts(1, 9),
        amounts(0, 9),
        held=amounts(5, 30),
        kept=amounts(1, 9),
        output=amounts(1, 3),
        parameters=amounts(0, 20),
        forward_peak=amounts(5, 40),
        backward_peak=amounts(1, 20),
        input_gradient_peak=amounts(1, 20),
    )


def every_cut(stages: int, ends: bool) -> Iterator[tuple[range, ...]]:
    """With ``ends``, the first and the last layer go with another."""
    places = range(2, LAYERS - 1) if ends else range(1, LAYERS)
    for inside in combinations(places, stages - 1):
        yield tuple(range(start, stop) for start, stop in pairwise((0, *inside, LAYERS)))


def needed(costs: LayerCosts, passes: Programs, stages: Sequence[range], states: float) -> float:
    """By the rank that needs most."""
    peaks = simulate(lower(passes), by_stage(costs, stages)).peaks
    weights = [
        sum(costs.parameters[layer] for stage in program.stages for layer in stages[stage]) for program in passes
    ]
    return max(peak + states * weight for peak, weight in zip(peaks, weights, strict=True))


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "blocks"])
@pytest.mark.parametrize(("name", "ranks"), [("gpipe", 3), ("zb-h1", 4)])
def test_where_ranks_have_one_stage_no_cut_needs_less_memory(name: str, ranks: int, ends: bool) -> None:
    passes = SCHEDULES[name](ranks, 4, 1)
    for seed, states in enumerate((0.0, 1.0, 4.0)):
        costs = drawn(seed)
        found = balanced(costs, passes, "memory", states=[states] * ranks, ends=ends)
        cuts = list(every_cut(ranks, ends))
        assert found in cuts
        assert needed(costs, passes, found, states) == min(needed(costs, passes, one, states) for one in cuts)


@pytest.mark.parametrize("ends", [True, pytest.param(False, marks=pytest.mark.parity)], ids=["ends", "blocks"])
@pytest.mark.parametrize(
    "name",
    [
        "interleaved",
        pytest.param("zb-v", marks=pytest.mark.parity),
        pytest.param("dualpipe-v", marks=pytest.mark.parity),
    ],
)
def test_where_ranks_have_two_stages_few_cuts_need_less_memory(name: str, ends: bool) -> None:
    """What moving layers leads to is mostly the best cut, and else not much worse."""
    passes = SCHEDULES[name](2, 4, 2)
    ratios = []
    for seed in range(6):
        costs = drawn(seed)
        found = needed(costs, passes, balanced(costs, passes, "memory", states=(4.0, 4.0), ends=ends), 4.0)
        ratios.append(found / min(needed(costs, passes, one, 4.0) for one in every_cut(4, ends)))
    assert max(ratios) < 1.06
    assert ratios.count(1.0) >= 5


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "blocks"])
def test_by_time_the_slowest_stage_is_as_fast_as_can_be(ends: bool) -> None:
    passes = SCHEDULES["1f1b"](3, 4, 1)
    for seed in range(6):
        costs = drawn(seed)
        times = [sum(each) for each in zip(costs.forward, costs.input_gradient, costs.weight_gradient, strict=True)]

        def slowest(stages: Sequence[range], times: Sequence[float] = times) -> float:
            return max(sum(times[layer] for layer in one) for one in stages)

        found = balanced(costs, passes, "time", ends=ends)
        assert found in list(every_cut(3, ends))
        assert slowest(found) == min(map(slowest, every_cut(3, ends)))


def test_earlier_stages_of_1f1b_have_fewer_layers_where_memory_counts() -> None:
    """They hold more micro-batches, 4 to 1; a rank of GPipe holds as many as any other. No more memory than needed is
    spent on making stages take alike, and no less: the largest holds 8, as 2 · 4 must."""
    alike = (1,) * 14
    costs = LayerCosts((1.0,) * 14, (1.0,) * 14, (1.0,) * 14, held=alike, kept=alike, output=(0,) * 14)

    def lengths(name: str) -> list[int]:
        return [len(one) for one in balanced(costs, SCHEDULES[name](4, 8, 1), "memory")]

    assert lengths("gpipe") == [3, 3, 4, 4]
    assert lengths("1f1b") == [2, 2, 4, 6]


def test_a_rank_whose_parameters_take_more_bytes_has_fewer() -> None:
    """As the first ranks of PipeDream, which keep more versions of their weights."""
    nothing = (0,) * 12
    costs = LayerCosts((1.0,) * 12, (1.0,) * 12, (1.0,) * 12, nothing, nothing, nothing, parameters=(10,) * 12)
    passes = SCHEDULES["1f1b"](3, 4, 1)
    for states, lengths in (((4, 4, 4), [4, 4, 4]), ((6, 3, 2), [2, 4, 6]), ((2, 3, 6), [6, 4, 2])):
        assert [len(one) for one in balanced(costs, passes, "memory", states=states)] == lengths


def test_no_program_is_gone_through_for_a_cut_that_needs_more_for_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 layers in 4 stages there are 55 ranges for each stage between the first and the last."""
    gone: list[int] = []

    def counted(programs: Programs, rank: int, costs: Costs) -> float:
        gone.append(rank)
        return peak(programs, rank, costs)

    monkeypatch.setattr("shoal.pipeline.stages.peak", counted)
    alike = (1,) * 12
    costs = LayerCosts((1.0,) * 12, (1.0,) * 12, (1.0,) * 12, held=alike, kept=alike, output=(0,) * 12)
    assert [len(one) for one in balanced(costs, SCHEDULES["gpipe"](4, 8, 1), "memory")] == [3, 3, 3, 3]
    assert len(gone) < 60


def test_among_cuts_of_two_stages_a_rank_that_need_as_much_the_faster_is_taken() -> None:
    """All that counts is in the last layer, so memory leaves the others free."""
    nothing = (0,) * 10
    costs = LayerCosts((1.0,) * 10, (1.0,) * 10, (1.0,) * 10, held=(0,) * 9 + (9,), kept=nothing, output=nothing)
    found = balanced(costs, SCHEDULES["zb-v"](2, 4, 2), "memory")
    assert sorted(len(one) for one in found) == [2, 2, 3, 3]


def test_the_end_layers_go_with_others_only_where_there_are_enough() -> None:
    costs = LayerCosts((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, held=(1,) * 3, kept=(1,) * 3, output=(1,) * 3)
    assert [balanced(costs, SCHEDULES["1f1b"](3, 4, 1), by) for by in ("time", "memory")] == [
        (range(0, 1), range(1, 2), range(2, 3))
    ] * 2
    with pytest.raises(LayoutError, match="pp = 4: more stages than the model's 3 layers; use pp=3 or fewer"):
        balanced(costs, SCHEDULES["1f1b"](4, 4, 1))
