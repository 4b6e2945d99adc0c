from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import pytest
from pipeline_ranks import breadth_first

from shoal.layout.kinds import SCHEDULES as ADMITTED
from shoal.pipeline.faults import faults
from shoal.pipeline.lower import lower
from shoal.pipeline.program import PASSES, Op, Program, Programs, placement
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.forward_only import forward_only
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b

SIZES = list(product(range(1, 6), range(1, 11)))
EXAMPLES = (Path(__file__).parent / "worked_examples.txt").read_text(encoding="utf-8").splitlines()
"""Of four ranks and eight micro-batches: the name of a schedule, then a line a rank."""


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


@pytest.mark.parametrize("at", range(0, len(EXAMPLES), 5))
def test_the_others_are_the_orders_of_the_literature(at: int) -> None:
    name, *orders = EXAMPLES[at : at + 5]
    assert [str(program) for program in SCHEDULES[name](4, 8, 2)] == orders


def test_1f1b_that_hides_transfer_time_runs_ahead_twice_as_far() -> None:
    assert text(one_f_one_b(3, 6, overlap=True)) == [
        "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]
    for ranks, micro_batches in SIZES:
        live = [in_flight(program) for program in one_f_one_b(ranks, micro_batches, overlap=True)]
        assert live == [min(2 * (ranks - rank) - 1, micro_batches) for rank in range(ranks)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", range(1, 6))
def test_every_schedule_is_valid_for_every_number_of_micro_batches_that_it_admits(name: str, ranks: int) -> None:
    kind = ADMITTED[name]
    for chunks in (1, 2, 3) if kind.any_chunks else (kind.chunks,):
        for micro_batches in range(1, 2 * ranks + 3):
            if not kind.admits(ranks, micro_batches) or (name == "list" and ranks * chunks > 6):
                continue
            programs = SCHEDULES[name](ranks, micro_batches, chunks)
            assert len(programs) == ranks
            assert sorted(placement(programs)) == sorted(rank for rank in range(ranks) for _ in range(chunks))
            lowered = lower(programs)
            assert faults(lowered) == []
            for before, after in zip(programs, lowered, strict=True):
                assert tuple(act for act in after.actions if act.op in PASSES) == before.actions


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_in_a_v_neighbours_share_a_rank_or_are_on_neighbouring_ones(name: str) -> None:
    home = placement(SCHEDULES[name](4, 8, 2))
    assert home == (0, 1, 2, 3, 3, 2, 1, 0)
    assert {abs(one - other) for one, other in pairwise(home)} == {0, 1}


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_chunk_goes_to_the_next_rank(chunks: int) -> None:
    for name in ("interleaved", "breadth-first"):
        assert placement(SCHEDULES[name](3, 6, chunks)) == (0, 1, 2) * chunks


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
