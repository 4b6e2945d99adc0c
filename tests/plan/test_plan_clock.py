"""A step's length on the planner's clock: the schedule's own simulation, and known closed forms."""

from __future__ import annotations

import pytest

from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulate import even, simulate
from shoal.plan import clock


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]
)
@pytest.mark.parametrize("transfer", [0.0, 0.1])
def test_long_steps_take_what_the_simulation_says(schedule: str, chunks: int, transfer: float) -> None:
    ranks, micro_batches = 4, 32
    costs = even(ranks, chunks, transfer=transfer)
    whole = simulate(SCHEDULES[schedule](ranks, micro_batches, chunks), costs)
    stages = list(zip(costs.forward, costs.input_gradient, costs.weight_gradient, strict=True))
    found = clock.length(schedule, ranks, micro_batches, chunks, stages, transfer)
    assert found == pytest.approx(max(spans[-1].stop for spans in whole.spans), rel=0.02)


@pytest.mark.parametrize(("schedule", "chunks", "bubble"), [("1f1b", 1, 7.0), ("interleaved", 4, 7.0 / 4)])
def test_the_bubble_is_the_closed_form(schedule: str, chunks: int, bubble: float) -> None:
    """(p − 1)/v micro-batches (Narayanan et al. 2021)."""
    stages = [(1 / chunks, 1 / chunks, 1 / chunks)] * (8 * chunks)
    assert clock.length(schedule, 8, 64, chunks, stages, 0.0) == pytest.approx(3 * (64 + bubble))


def test_as_many_micro_batches_are_in_flight_as_the_program_says() -> None:
    assert clock.flight("1f1b", 4, 64, 1).live == (4, 3, 2, 1)
    assert clock.flight("gpipe", 2, 6, 1).live == (6, 6)
