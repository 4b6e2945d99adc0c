from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.bestfit import best_fit


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """The room that each bin has left, by the textbook."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, bin_) for bin_, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(capacity=st.integers(1, 25), draws=st.lists(st.integers(0, 1000), max_size=60))
def test_the_bins_are_those_of_the_textbook(capacity: int, draws: list[int]) -> None:
    lengths = [1 + draw % capacity for draw in draws]
    bins = best_fit(np.array(lengths, np.int64), capacity)
    used = np.bincount(bins, lengths, minlength=0)
    assert sorted(capacity - used.astype(int)) == one_by_one(lengths, capacity)
    assert sorted(set(bins.tolist())) == list(range(len(used)))


def test_an_item_that_fits_no_bin_is_our_fault() -> None:
    with pytest.raises(AssertionError, match="length outside"):
        best_fit(np.array([3, 5]), 4)
