from __future__ import annotations

from itertools import product

import pytest
from pipeline_ranks import breadth_first

from shoal.pipeline.faults import faults
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Op, Program, Programs
from shoal.pipeline.schedules.forward_only import forward_only
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b

SIZES = list(product(range(1, 6), range(1, 11)))


def text(programs: Programs) -> list[str]:
    """The programs without their stages, where a rank has one: F0 F1 B0 B1."""
    for rank, program in enumerate(programs):
        assert program.stages == (rank,)
    return [" ".join(f"{act.op.value}{act.micro_batch}" for act in program.actions) for program in programs]


def in_flight(program: Program) -> int:
    """The most micro-batches that are between their forward and their backward pass at one moment."""
    most = live = 0
    for act in program.actions:
        live += {Op.FORWARD: 1, Op.BACKWARD: -1}.get(act.op, 0)
        most = max(most, live)
    assert live == 0
    return most


def test_1f1b_is_the_order_of_the_literature() -> None:
    assert text(one_f_one_b(4, 8)) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]
    assert text(one_f_one_b(4, 2)) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_gpipe_is_all_forward_then_all_backward() -> None:
    assert text(gpipe(4, 8)) == ["F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7"] * 4


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_schedules_are_valid_for_any_ranks_and_micro_batches_and_keep_what_they_say(
    ranks: int, micro_batches: int
) -> None:
    assert faults(lower(gpipe(ranks, micro_batches))) == []
    assert faults(lower(one_f_one_b(ranks, micro_batches))) == []
    assert [in_flight(program) for program in gpipe(ranks, micro_batches)] == [micro_batches] * ranks
    live = [in_flight(program) for program in one_f_one_b(ranks, micro_batches)]
    assert live == [min(ranks - rank, micro_batches) for rank in range(ranks)]


@pytest.mark.parametrize("micro_batches", range(1, 5))
def test_without_a_pipeline_one_micro_batch_is_alive_at_a_time(micro_batches: int) -> None:
    (program,) = lower(one_f_one_b(1, micro_batches))
    assert in_flight(program) == 1
    assert {act.op.value for act in program.actions} == set("FBRNU")


@pytest.mark.parametrize("home", [(0,), (0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (1, 0)])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_forward_passes_are_valid_on_any_placement(home: tuple[int, ...], micro_batches: int) -> None:
    programs = lower(forward_only(home, micro_batches))
    assert faults(programs, train=False) == []
    assert faults(lower(breadth_first(home, micro_batches))) == []
    assert "rank 0: B0.0 is missing" in faults(programs) or home[0] != 0
