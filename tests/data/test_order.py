from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.hashing import derive, mix, uniform
from shoal.data.order import Order, Permutation
from shoal.errors import DataError

quick = settings(max_examples=60, deadline=None, derandomize=True)
seeds = st.integers(0, 2**63 - 1)


@quick
@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(n: int, key: int) -> None:
    values = Permutation(n, key)(np.arange(n))
    assert np.array_equal(np.sort(values), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025])
def test_permutation_is_a_bijection_around_powers_of_two(n: int) -> None:
    assert set(Permutation(n, 7)(np.arange(n)).tolist()) == set(range(n))


def test_permutation_of_a_huge_range_is_computed_place_by_place() -> None:
    n = 2**62 - 5
    places = np.array([0, 1, n - 1, 12345678901234567])
    values = Permutation(n, 3)(places)
    assert values.min() >= 0
    assert values.max() < n
    assert [int(Permutation(n, 3)(place[None])[0]) for place in places] == values.tolist()


def test_every_value_is_equally_likely_at_every_place() -> None:
    n, keys = 7, 2100
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), Permutation(n, key)(np.arange(n))] += 1
    chi_square = ((counts - keys / n) ** 2 / (keys / n)).sum()
    assert chi_square < 80  # 36 degrees of freedom: mean 36, and over 80 once in 30,000


def test_a_permutation_leaves_no_order_behind() -> None:
    n = 100_003
    values = Permutation(n, 1)(np.arange(n)).astype(float)
    for lag in (1, 2, 256, 512):
        correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
        assert abs(correlation) < 5 / n**0.5
    assert abs(np.corrcoef(values, np.arange(n))[0, 1]) < 5 / n**0.5
    assert (values == np.arange(n)).sum() < 10


def test_other_keys_give_other_permutations() -> None:
    places = np.arange(1000)
    first, second = Permutation(1000, 1)(places), Permutation(1000, 2)(places)
    assert (first == second).mean() < 0.02


@quick
@given(windows=st.integers(2, 300), share=st.floats(0, 0.5), seed=seeds)
def test_epochs_cover_every_training_window_once(windows: int, share: float, seed: int) -> None:
    order = Order(windows, share, seed)
    epochs = order.train(np.arange(3 * order.n_train)).reshape(3, -1)
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.sort(epochs[0]))
        assert len(set(epoch.tolist())) == order.n_train


@quick
@given(windows=st.integers(3, 300), share=st.floats(0, 0.6), first=seeds, second=seeds)
def test_no_seed_trains_on_another_seeds_validation(windows: int, share: float, first: int, second: int) -> None:
    one, other = Order(windows, share, first), Order(windows, share, second)
    kept = one.validation(np.arange(one.n_validation))
    assert np.array_equal(kept, other.validation(np.arange(one.n_validation)))
    trained = other.train(np.arange(2 * other.n_train))
    assert set(kept.tolist()) | set(trained.tolist()) == set(range(windows))
    assert not set(kept.tolist()) & set(trained.tolist())


def test_validation_takes_the_rounded_share() -> None:
    assert [Order(1000, share, 0).n_validation for share in (0.0, 0.0004, 0.05, 0.0516)] == [0, 0, 50, 52]


def test_seed_and_epoch_change_the_order() -> None:
    order, other = Order(500, 0.1, 0), Order(500, 0.1, 1)
    first, second = order.train(np.arange(900)).reshape(2, 450)
    assert (first == second).mean() < 0.03
    assert (first == other.train(np.arange(450))).mean() < 0.03


def test_the_order_is_the_same_on_every_machine_and_release() -> None:
    # Recorded values: a change here changes every run that is resumed.
    assert derive("order", 1, 2) == 884821037283150822
    assert Permutation(100, 42)(np.arange(6)).tolist() == [7, 79, 5, 10, 94, 27]
    assert Order(40, 0.25, 9).train(np.array([0, 1, 29, 30, 31])).tolist() == [16, 21, 17, 1, 7]
    assert uniform(5, np.array([0, 1])).tolist() == [0.386768045983934, 0.7398170143550824]


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_outside_its_range_is_refused_by_name(share: float) -> None:
    with pytest.raises(DataError, match=r"data\.validation = .*at least 0 and below 1"):
        Order(10, share, 0)


def test_a_share_that_leaves_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.validation = 0\.9: leaves none of the 2 samples for training"):
        Order(2, 0.9, 0)


def test_mix_is_injective_and_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        words = mix(np.arange(100_000, dtype=np.uint64))
        uniform(2**64 - 1, np.array([2**63 - 1, 0]))
        Permutation(2**62, 2**64 - 1)(np.array([2**62 - 1]))
    assert len(set(words.tolist())) == 100_000


def test_uniform_numbers_are_uniform_in_every_counter() -> None:
    row, column = np.arange(200)[:, None], np.arange(200)[None]
    numbers = uniform(11, row, column)
    assert numbers.shape == (200, 200)
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    histogram, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(histogram - 2000).max() < 5 * 2000**0.5
    assert abs(numbers.mean(axis=0) - 0.5).max() < 5 / (12 * 200) ** 0.5
    assert abs(numbers.mean(axis=1) - 0.5).max() < 5 / (12 * 200) ** 0.5
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.025
    assert not np.array_equal(numbers, uniform(12, row, column))
