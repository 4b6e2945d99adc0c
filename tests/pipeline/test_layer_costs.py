"""What stages cost that are made up of layers, and what ranks then need at their peak: worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from shoal.pipeline.layer_costs import LayerCosts, by_stage
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Act, Op, Program
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.zb_h1 import zb_h1
from shoal.pipeline.simulate import Costs, even, peak, simulate

F, B, INPUT, W = Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT
LAYERS = LayerCosts(
    forward=(1.0, 2.0, 3.0),
    input_gradient=(4.0, 5.0, 6.0),
    weight_gradient=(7.0, 0.0, 9.0),
    held=(10, 20, 30),
    kept=(4, 6, 5),
    output=(3, 2, 1),
)
KNOWN = replace(
    LAYERS,
    context=(1, 5, 2),
    own_output=(3, 0, 0),
    common=(3, 0, 0),
    kept_gradient=(0, 2, 0),
    forward_peak=(12, 50, 33),
    backward_peak=(40, 8, 9),
    input_gradient_peak=(9, 26, 11),
)


def test_stages_are_the_sums_of_their_layers() -> None:
    assert by_stage(LAYERS, [range(2), range(2, 3)], transfer=0.25) == Costs(
        forward=(3.0, 3.0),
        input_gradient=(9.0, 6.0),
        weight_gradient=(7.0, 9.0),
        held=(30, 30),
        kept=(10, 5),
        transfer=0.25,
        boundary=(2, 1),
        shared=(0, 0),
    )


def test_what_neighbours_share_counts_once_and_passes_have_peaks() -> None:
    costs = by_stage(KNOWN, [range(2), range(2, 3)])
    assert costs.held == (10 + 20 - 3 + 5, 30 + 2)
    # The second layer begins where the first has left 10, of which its input is 3. The context is there all the time.
    assert costs.forward_peak == (max(12, 10 - 3 + 50) + 5, 33 + 2)
    # In the first layer again, 32 have become 11, and there is the gradient of the output beside what the layer makes.
    assert costs.backward_peak == (max(8 - 2, 11 - 32 + 40), 9 - 1)
    # And what the second layer keeps, of which that gradient is a part.
    assert costs.input_gradient_peak == (max(26 - 2, 11 - 32 + 9 + (6 - 2)), 11 - 1)
    assert by_stage(KNOWN, [range(1), range(1, 3)]).shared == (3, 0)


def test_the_peak_within_a_pass_counts() -> None:
    plain = replace(even(2), held=(10.0, 10.0), boundary=(1.0, 1.0))
    assert simulate(lower(gpipe(2, 1)), plain).peaks == (12, 11)
    # On top of 10 and of the gradient that rank 0 has received. Rank 1's last pass leaves its input's gradient.
    assert simulate(lower(gpipe(2, 1)), replace(plain, backward_peak=(6.0, 0.5))).peaks == (17, 10.5)
    # On one rank, the second stage takes in what the first has made: it is a part of what its pass needs at most.
    order = tuple(Act(op, stage, 0) for op, stage in ((F, 0), (F, 1), (B, 1), (B, 0)))
    assert peak([Program((0, 1), 1, order)], 0, replace(plain, forward_peak=(13.0, 14.0))) == 10 + 14
    assert peak([Program((0, 1), 1, order)], 0, replace(plain, forward_peak=(28.0, 14.0))) == 28


def test_a_split_backward_pass_has_a_peak_of_its_own() -> None:
    (program,) = zb_h1(1, 2)
    costs = Costs((1.0,), (1.0,), (1.0,), held=(10.0,), kept=(12.0,), input_gradient_peak=(5.0,), backward_peak=(50.0,))
    assert {act.op for act in program.actions} == {F, INPUT, W}
    # What awaits the weights' gradients may be more than what was held.
    order = (Act(F, 0, 0), Act(F, 0, 1), Act(INPUT, 0, 0), Act(INPUT, 0, 1), Act(W, 0, 0), Act(W, 0, 1))
    assert simulate([Program((0,), 2, order)], costs).peaks == (12 + 10 + 5,)


def test_an_output_that_its_own_stage_holds_counts_once_until_then() -> None:
    costs = replace(even(2), held=(10.0, 10.0), boundary=(4.0, 4.0))
    assert simulate(lower(gpipe(2, 1)), costs).peaks == (18, 14)
    assert simulate(lower(gpipe(2, 1)), replace(costs, shared=(4.0, 0.0))).peaks == (14, 14)
    # On one rank the next stage has a copy, of which this is no part.
    order = tuple(Act(op, stage, 0) for op, stage in ((F, 0), (F, 1), (B, 1), (B, 0)))
    assert simulate([Program((0, 1), 1, order)], costs).peaks == (24,)
    assert simulate([Program((0, 1), 1, order)], replace(costs, shared=(4.0, 0.0))).peaks == (24,)
