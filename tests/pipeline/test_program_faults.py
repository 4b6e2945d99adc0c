"""Programs that are wrong in one way each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pipeline_ranks import breadth_first

from shoal.pipeline.faults import faults
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Act, Op, Program, Programs
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.pipeline.schedules.zb_h1 import zb_h1

GOOD = lower(one_f_one_b(3, 2))


def changed(programs: Programs, rank: int, actions: Sequence[Act]) -> list[Program]:
    return [replace(one, actions=tuple(actions)) if at == rank else one for at, one in enumerate(programs)]


def moved(programs: Programs, rank: int, act: str, before: str) -> list[Program]:
    """``act`` of a rank, moved to just before another of its actions."""
    order = {str(one): one for one in programs[rank].actions}
    one = order.pop(act)
    names = list(order)
    names.insert(names.index(before), act)
    return changed(programs, rank, [one if name == act else order[name] for name in names])


@pytest.mark.parametrize("rank", range(3))
def test_any_missing_repeated_or_strange_action_is_found(rank: int) -> None:
    assert faults(GOOD) == []
    actions = GOOD[rank].actions
    for at, act in enumerate(actions):
        assert f"rank {rank}: {act} is missing" in faults(changed(GOOD, rank, actions[:at] + actions[at + 1 :]))
        assert f"rank {rank}: an action occurs twice" in faults(changed(GOOD, rank, (act, *actions)))
    for stranger in (Act(Op.FORWARD, (rank + 1) % 3, 0), Act(Op.BACKWARD, rank, 2), Act(Op.NORM, 0), Act(Op.REDUCE, 7)):
        found = faults(changed(GOOD, rank, (*actions, stranger)))
        assert f"rank {rank}: {stranger} does not belong here" in found


def test_a_message_to_the_wrong_rank_is_found() -> None:
    actions = [act._replace(peer=2) if str(act) == "SA0.1>1" else act for act in GOOD[0].actions]
    assert faults(changed(GOOD, 0, actions)) == ["rank 0: SA0.1>1 is missing", "rank 0: SA0.1>2 does not belong here"]


@pytest.mark.parametrize(
    ("rank", "act", "before", "first"),
    [
        (1, "B1.0", "F1.0", "F1.0"),
        (1, "F1.0", "RA1.0<0", "RA1.0<0"),
        (1, "SA1.0>2", "F1.0", "F1.0"),
        (1, "RG1.0<2", "F1.0", "F1.0"),
        (1, "B1.1", "RG1.1<2", "RG1.1<2"),
        (1, "SG1.0>0", "B1.0", "B1.0"),
        (1, "DA1.1>2", "SA1.1>2", "SA1.1>2"),
        (1, "R1", "B1.1", "B1.1"),
        (2, "N", "R2", "R2"),
        (2, "N", "DG2.1>1", "DG2.1>1"),
        (2, "U", "N", "N"),
    ],
)
def test_an_action_that_comes_too_early_is_found(rank: int, act: str, before: str, first: str) -> None:
    assert f"rank {rank}: {first} must come before {act}" in faults(moved(GOOD, rank, act, before))


HALVES = lower(zb_h1(2, 2))
"""Rank 1: RA1.0<0 F1.0 RA1.1<0 I1.0 SG1.0>0 F1.1 I1.1 SG1.1>0 W1.0 W1.1 R1 DG1.0>0 DG1.1>0 N U."""


@pytest.mark.parametrize(
    ("rank", "act", "before", "first"),
    [
        (1, "W1.1", "I1.1", "I1.1"),
        (1, "R1", "W1.1", "W1.1"),
        (1, "SG1.0>0", "I1.0", "I1.0"),
        (0, "I0.1", "RG0.1<1", "RG0.1<1"),
    ],
)
def test_a_backward_pass_in_two_has_an_order_too(rank: int, act: str, before: str, first: str) -> None:
    assert faults(HALVES) == []
    assert f"rank {rank}: {first} must come before {act}" in faults(moved(HALVES, rank, act, before))


def test_a_backward_pass_is_whole_or_in_two() -> None:
    actions = HALVES[1].actions
    both = changed(HALVES, 1, (*actions, Act(Op.BACKWARD, 1, 0)))
    assert "rank 1: an action occurs twice" in faults(both)
    for op, fault in ((Op.WEIGHT_GRADIENT, "W1.0 is missing"), (Op.INPUT_GRADIENT, "W1.0 does not belong here")):
        without = changed(HALVES, 1, [act for act in actions if act[:3] != (op, 1, 0)])
        assert f"rank 1: {fault}" in faults(without)
    whole = [act._replace(op=Op.BACKWARD) if act.op is Op.INPUT_GRADIENT else act for act in actions]
    mixed = changed(HALVES, 1, [act for act in whole if act.op is not Op.WEIGHT_GRADIENT])
    assert [fault for fault in faults(mixed) if "R1" not in fault] == []


def test_stages_of_one_rank_come_in_order_too() -> None:
    programs = lower(breadth_first((0, 0), 1))
    assert faults(programs) == []
    assert faults(moved(programs, 0, "F1.0", "F0.0")) == ["rank 0: F0.0 must come before F1.0"]
    assert faults(moved(programs, 0, "B0.0", "B1.0")) == ["rank 0: B1.0 must come before B0.0"]


@pytest.mark.parametrize(
    ("stages", "fault"),
    [(((0,), (1,), (1,)), "stage 1 is on 2 ranks"), (((0,), (1,), (3,)), "stage 2 is on 0 ranks")],
)
def test_a_stage_on_no_rank_or_on_two_is_found(stages: Sequence[tuple[int, ...]], fault: str) -> None:
    assert faults([replace(one, stages=held) for one, held in zip(GOOD, stages, strict=True)]) == [fault]


def test_ranks_that_differ_in_the_number_of_micro_batches_are_found() -> None:
    programs = [GOOD[0], GOOD[1], replace(GOOD[2], micro_batches=3)]
    assert faults(programs) == ["ranks differ in the number of micro-batches: [2, 3]"]


def program(stage: int, micro_batches: int, text: str) -> Program:
    """The program that reads so."""
    found = (re.fullmatch(r"([A-Z]+)(\d*)(?:\.(\d+))?(?:[<>](\d+))?", word) for word in text.split())
    parts = [match.groups() for match in found if match]
    actions = [Act(Op(op), *(int(number) if number else -1 for number in rest)) for op, *rest in parts]
    assert " ".join(map(str, actions)) == text
    return Program((stage,), micro_batches, tuple(actions))


def test_messages_received_in_another_order_than_sent_are_found() -> None:
    programs = moved(lower(gpipe(2, 3)), 1, "RA1.1<0", "RA1.0<0")
    assert faults(programs) == ["rank 1: RA1.1<0 comes where rank 0 sends for RA1.0<0"]


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Rank 1 takes both micro-batches forward before it answers the first; rank 0 wants that answer before it starts
    the second."""
    alternating = program(0, 2, "F0.0 SA0.0>1 RG0.0<1 B0.0 F0.1 SA0.1>1 RG0.1<1 B0.1 R0 DA0.0>1 DA0.1>1 N U")
    (fault,) = faults([alternating, lower(gpipe(2, 2))[1]])
    assert fault.startswith("deadlock: ")
    assert "rank 1's F1.1 waits for rank 0's SA0.1>1" in fault
    assert "rank 0's B0.0 waits for rank 1's SG1.0>0" in fault


def test_a_drop_that_comes_before_there_can_be_room_for_what_was_sent_is_found() -> None:
    """Rank 0 makes room for the gradient of micro-batch 0 when it has taken in that of 1, which rank 1 sends when that
    of 0 is gone."""
    backwards = "F0.0 SA0.0>1 F0.1 SA0.1>1 RG0.1<1 B0.1 RG0.0<1 B0.0 R0 DA0.0>1 DA0.1>1 N U"
    early = moved(lower(gpipe(2, 2)), 1, "DG1.0>0", "B1.1")
    disorder, deadlock = faults([program(0, 2, backwards), early[1]])
    assert disorder == "rank 0: RG0.1<1 comes where rank 1 sends for RG0.0<1"
    assert "rank 1's DG1.0>0 waits for rank 0's RG0.0<1" in deadlock
    assert "rank 0's B0.1 waits for rank 1's SG1.1>0" in deadlock


def test_a_drop_that_comes_before_the_pass_that_makes_room_for_an_activation_of_unknown_form_is_found() -> None:
    """Rank 1 takes micro-batch 0 through stage 4 before it takes 1 through stage 1, although it expects that one by
    then. What it needs for stage 4 has gone over rank 2, and comes from what rank 0 does after the drop."""
    orders = {(0, 2): "F0.0 F0.1 F2.0 F2.1", (1, 4): "F1.0 F4.0 F1.1 F4.1", (3,): "F3.0 F3.1"}
    programs = lower([replace(program(0, 2, text), stages=stages) for stages, text in orders.items()])
    assert faults(programs, train=False) == []
    (fault,) = faults(moved(programs, 0, "DA0.1>1", "F2.0"), train=False)
    assert fault.startswith("deadlock: ")
    assert "rank 0's DA0.1>1 waits for rank 1's F1.1" in fault
