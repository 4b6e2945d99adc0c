from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.pipeline.program import Act, Op, Program, faults
from shoal.pipeline.schedules.single import accumulate, forward_only

F, B, R = (lambda *at, op=op: Act(op, *at) for op in (Op.FORWARD, Op.BACKWARD, Op.REDUCE))
N, U = Act(Op.NORM), Act(Op.UPDATE)
# Two stages of one rank, two micro-batches, the first stage's gradients reduced last.
TWO = Program((0, 3), 2, (
    F(0, 0), F(3, 0), F(0, 1), F(3, 1), B(3, 1), B(3, 0), R(3), B(0, 0), B(0, 1), R(0), N, U,
))  # fmt: skip


def change(program: Program, *, drop: Act | None = None, add: Act | None = None, last: Act | None = None) -> Program:
    """``program`` without an action, with one more at the end, or with one moved to the end."""
    kept = [act for act in program.actions if act not in (drop, last)]
    return replace(program, actions=(*kept, *(act for act in (add, last) if act)))


@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_accumulation_and_evaluation_are_valid_for_any_number_of_micro_batches(micro_batches: int) -> None:
    program = accumulate(micro_batches)
    assert faults(program) == []
    assert program.final_backward(0) == micro_batches - 1
    live = 0
    for act in program.actions:
        live += {Op.FORWARD: 1, Op.BACKWARD: -1}.get(act.op, 0)
        assert live in (0, 1), "one micro-batch's activations at a time"
    assert faults(forward_only(micro_batches), train=False) == []
    assert "B0.0 is missing" in faults(forward_only(micro_batches))


def test_a_program_of_several_stages_is_valid_in_any_order_that_respects_its_passes() -> None:
    assert faults(TWO) == []
    assert (TWO.final_backward(3), TWO.final_backward(0)) == (0, 1)
    assert str(TWO) == "F0.0 F3.0 F0.1 F3.1 B3.1 B3.0 R3 B0.0 B0.1 R0 N U"


@pytest.mark.parametrize("act", TWO.actions, ids=str)
def test_any_missing_or_repeated_action_is_found(act: Act) -> None:
    assert faults(change(TWO, drop=act)) == [f"{act} is missing"]
    assert "an action occurs twice" in faults(replace(TWO, actions=(act, *TWO.actions)))


@pytest.mark.parametrize(
    ("late", "before"),
    [(F(0, 1), ["B0.1"]), (B(3, 0), ["R3"]), (B(0, 0), ["R0"]), (R(3), ["N"]), (R(0), ["N"]), (N, ["U"])],
    ids=str,
)
def test_an_action_that_comes_too_late_is_found(late: Act, before: list[str]) -> None:
    assert faults(change(TWO, last=late)) == [f"{late} must come before {other}" for other in before]


@pytest.mark.parametrize("stranger", [F(1, 0), B(0, 2), R(7), Act(Op.NORM, 0)], ids=str)
def test_an_action_of_another_stage_or_micro_batch_is_found(stranger: Act) -> None:
    assert faults(change(TWO, add=stranger)) == [f"{stranger} does not belong here"]
