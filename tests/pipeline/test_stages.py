from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LayoutError
from shoal.pipeline.stages import cut


def sums(costs: Sequence[float], ranges: Sequence[range]) -> list[float]:
    return [sum(costs[layer] for layer in one) for one in ranges]


def every_cut(layers: int, stages: int) -> list[list[range]]:
    inside = combinations(range(1, layers), stages - 1)
    return [[range(a, b) for a, b in pairwise((0, *ends, layers))] for ends in inside]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_the_largest_cost_is_the_least_of_all_cuts_that_give_each_stage_a_block(costs: list[int], stages: int) -> None:
    """Against all cuts there are; where blocks are too few, against those that leave no stage empty."""
    layers = len(costs)
    if stages > layers:
        with pytest.raises(LayoutError, match=f"pp = {stages}: more stages than the model's {layers} layers; use pp="):
            cut(costs, stages)
        return
    found = cut(costs, stages)
    assert [layer for one in found for layer in one] == list(range(layers))
    blocks = range(1, layers - 1)
    allowed = every_cut(layers, stages)
    if len(blocks) >= stages:
        allowed = [ranges for ranges in allowed if all(set(one) & set(blocks) for one in ranges)]
    assert list(found) in allowed
    assert max(sums(costs, found)) == min(max(sums(costs, one)) for one in allowed)


@pytest.mark.parametrize(
    ("costs", "stages", "lengths"),
    [
        ([0, *[1] * 8, 0], 4, [3, 2, 2, 3]),  # two blocks each
        ([0, *[1] * 8, 0], 3, [3, 3, 4]),  # the first stage, which keeps the most activations, has the fewest blocks
        ([0, *[1] * 9, 3], 4, [3, 3, 3, 2]),  # a head as dear as three blocks goes with one
        ([10, *[1] * 7, 0], 3, [2, 3, 4]),  # the rest is even, too, though the first stage sets the pace
        ([5, 1], 2, [1, 1]),
        ([5], 1, [1]),
    ],
)
def test_ties_are_broken_towards_even_stages_and_a_light_first(
    costs: list[float], stages: int, lengths: list[int]
) -> None:
    assert [len(one) for one in cut(costs, stages)] == lengths


def test_blocks_are_counted_without_the_ends() -> None:
    assert cut([9.0] * 10, 3, (4, 2, 2)) == (range(0, 5), range(5, 7), range(7, 10))
    assert cut([9.0] * 10, 1, (8,)) == (range(0, 10),)


@pytest.mark.parametrize("blocks", [(4, 4), (4, 3, 2), (8, 0, 0), (9, -2, 1), ()])
def test_blocks_that_do_not_fit_are_refused(blocks: tuple[int, ...]) -> None:
    text = "/".join(map(str, blocks))
    expected = f"layers = {text}: the model has 8 blocks for 3 stages; use 3 numbers from 1 that add up to 8"
    with pytest.raises(LayoutError, match=expected):
        cut([1.0] * 10, 3, blocks)
