from __future__ import annotations

from math import cos, pi, sqrt

import pytest

from shoal.config import Schedule
from shoal.optim.schedule import rate


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_climbs_evenly_and_reaches_one_at_its_end(kind: str) -> None:
    schedule = Schedule(kind=kind, warmup=4, decay=0.25)
    assert [rate(schedule, step, 40) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    rates = [rate(schedule, step, 40) for step in range(4, 40)]
    assert rates == sorted(rates, reverse=True), "after it, the rate never rises"


def test_constant_stays_at_one() -> None:
    assert [rate(Schedule(kind="constant"), step, 10) for step in (0, 5, 9, 100)] == [1] * 4


def test_linear_falls_to_its_floor_in_even_steps() -> None:
    schedule = Schedule(kind="linear", warmup=10, floor=0.2)
    found = [rate(schedule, step, 91) for step in (10, 30, 50, 70, 90, 91, 500)]
    assert found == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_falls_to_its_floor_along_half_a_cosine() -> None:
    schedule = Schedule(kind="cosine", warmup=10, floor=0.2)  # 80 steps from step 10 to step 90, the last of 91
    quarter = 0.2 + 0.8 * (1 + sqrt(0.5)) / 2
    found = [rate(schedule, step, 91) for step in (10, 30, 50, 70, 90, 91, 500)]
    assert found == pytest.approx([1, quarter, 0.6, 1.2 - quarter, 0.2, 0.2, 0.2])
    assert rate(Schedule(kind="cosine", floor=0.0), 3, 10) == pytest.approx(0.5 * (1 + cos(pi * 3 / 9)))


def test_wsd_stays_at_one_and_falls_linearly_over_its_last_share() -> None:
    schedule = Schedule(kind="wsd", warmup=5, decay=0.2, floor=0.1)  # 20 of 100 steps, from step 79 to step 99
    assert [rate(schedule, step, 100) for step in (5, 50, 79)] == [1, 1, 1]
    assert [rate(schedule, step, 100) for step in (84, 89, 99)] == pytest.approx([0.775, 0.55, 0.1])
    assert rate(Schedule(kind="wsd", decay=1, floor=0.0), 49, 100) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_rates_of_very_short_runs_are_defined(kind: str) -> None:
    for steps in (1, 2, 3):
        for warmup in (0, 1, 5):
            rates = [rate(Schedule(kind=kind, warmup=warmup), step, steps) for step in range(steps)]
            assert all(0 < one <= 1 for one in rates)
    assert rate(Schedule(kind=kind), 0, 1) == 1
