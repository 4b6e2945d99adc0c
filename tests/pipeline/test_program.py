from __future__ import annotations

from shoal.pipeline.program import Act, Op, Program, giver, named, placement, taker


def test_actions_are_written_short_and_in_words() -> None:
    acts = {
        Act(Op.FORWARD, 1, 3): ("F1.3", "the forward pass of stage 1, micro-batch 3"),
        Act(Op.SEND_ACTIVATION, 1, 3, 2): ("SA1.3>2", "sending the output of stage 1, micro-batch 3"),
        Act(Op.RECEIVE_GRADIENT, 0, 0, 1): (
            "RG0.0<1",
            "receiving the gradient of the output of stage 0, micro-batch 0",
        ),
        Act(Op.DROP_GRADIENT, 2, 0, 1): (
            "DG2.0>1",
            "waiting for the receipt of the gradient of the input of stage 2, micro-batch 0",
        ),
        Act(Op.REDUCE, 2): ("R2", "the reduction of stage 2"),
        Act(Op.UPDATE): ("U", "the update"),
    }
    assert {act: (str(act), act.in_words()) for act in acts} == acts
    assert len({Act(op, 0).in_words() for op in Op}) == len(Op)


def test_a_program_knows_the_last_backward_pass_of_each_stage() -> None:
    order = [Act(Op.BACKWARD, 3, 1), Act(Op.BACKWARD, 0, 0), Act(Op.BACKWARD, 3, 0), Act(Op.BACKWARD, 0, 1)]
    program = Program((0, 3), 2, tuple(order))
    assert program.completing == {3: Act(Op.BACKWARD, 3, 0), 0: Act(Op.BACKWARD, 0, 1)}
    assert str(program) == "B3.1 B0.0 B3.0 B0.1"


def test_gradients_are_complete_after_the_last_backward_or_weight_gradient_pass() -> None:
    order = [Act(Op.INPUT_GRADIENT, 0, 0), Act(Op.BACKWARD, 1, 1), Act(Op.WEIGHT_GRADIENT, 0, 1)]
    order += [Act(Op.WEIGHT_GRADIENT, 0, 0), Act(Op.INPUT_GRADIENT, 1, 0)]
    program = Program((0, 1), 2, tuple(order))
    assert program.completing == {0: Act(Op.WEIGHT_GRADIENT, 0, 0), 1: Act(Op.BACKWARD, 1, 1)}


def test_an_input_gradient_pass_takes_in_and_gives_what_a_whole_backward_pass_does() -> None:
    half, whole = Act(Op.INPUT_GRADIENT, 1, 5), Act(Op.BACKWARD, 1, 5)
    assert named(half) == named(whole) == whole
    assert (giver(half, 3), taker(half, 3)) == (giver(whole, 3), taker(whole, 3))
    assert giver(half, 3) == Act(Op.BACKWARD, 2, 5)
    weights = Act(Op.WEIGHT_GRADIENT, 1, 5)
    assert (named(weights), giver(weights, 3), taker(weights, 3)) == (weights, None, None)


def test_placement_is_the_rank_of_each_stage() -> None:
    assert placement([Program((0, 3), 1, ()), Program((2, 1), 1, ())]) == (0, 1, 1, 0)


def test_activations_go_up_the_stages_and_gradients_down() -> None:
    for op, step in ((Op.FORWARD, -1), (Op.BACKWARD, 1)):
        for stage in range(4):
            act, before, after = Act(op, stage, 7), Act(op, stage + step, 7), Act(op, stage - step, 7)
            assert giver(act, 4) == (before if 0 <= before.stage < 4 else None)
            assert taker(act, 4) == (after if 0 <= after.stage < 4 else None)
    assert giver(Act(Op.REDUCE, 2), 4) is None
    assert taker(Act(Op.REDUCE, 2), 4) is None
