"""The simulator against the closed forms of the literature."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from shoal.pipeline.lower import lower
from shoal.pipeline.program import Act, Op, Program, Programs
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.forward_only import forward_only
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.interleaved import interleaved
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.pipeline.schedules.zb_h1 import zb_h1
from shoal.pipeline.schedules.zb_h2 import zb_h2
from shoal.pipeline.simulate import Costs, Simulation, Span, even, simulate

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (1.0, 2.0, 1.0), (2.0, 1.0, 1.0), (1.0, 1.0, 2.0)]
"""What F, I and W take."""
SIZES = [(ranks, micro_batches) for ranks in (2, 3, 4, 8) for micro_batches in range(ranks, 4 * ranks + 1)]


def run(programs: Programs, times: tuple[float, float, float] = TIMES[0], transfer: float = 0.0) -> Simulation:
    forward, input_gradient, weight_gradient = times
    costs = even(
        len(programs),
        len(programs[0].stages),
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        transfer=transfer,
    )
    return simulate(programs, costs)


def extra(one: Simulation) -> float:
    """What the step takes beyond its work."""
    return one.makespan - one.work


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("times", TIMES)
def test_steps_take_as_long_as_the_literature_says(
    ranks: int, micro_batches: int, times: tuple[float, float, float]
) -> None:
    f, i, w = times
    hops, full = ranks - 1, sum(times)
    expected = {"gpipe": hops * full, "1f1b": hops * full, "1f1b-overlap": hops * full}
    expected |= {"zb-h1": hops * max(f, f + i - w)}
    for name, time in expected.items():
        one = run(SCHEDULES[name](ranks, micro_batches, 1), times)
        assert one.work == pytest.approx(micro_batches * full)
        assert extra(one) == pytest.approx(time), name
    if micro_batches >= 2 * ranks - 1:
        one = run(zb_h2(ranks, micro_batches), times)
        assert one.bubble_within == pytest.approx(hops * max(0, f + i - 2 * w))
    for chunks in (1, 2, 3):
        one = run(SCHEDULES["breadth-first"](ranks, micro_batches, chunks), times)
        assert extra(one) == pytest.approx(hops * full / chunks)
        if micro_batches % ranks == 0:
            one = run(interleaved(ranks, micro_batches, chunks), times)
            assert extra(one) == pytest.approx(hops * full / chunks)
    if micro_batches >= 2 * ranks and f == i == w:
        one = run(SCHEDULES["zb-v"](ranks, micro_batches, 2), times)
        assert one.bubble_within == pytest.approx(0)
        assert extra(one) == pytest.approx(hops * f / 2)
        one = run(SCHEDULES["dualpipe-v"](ranks, micro_batches, 2), times)
        assert extra(one) == pytest.approx(hops * (full + i + w - 3 * w) / 2 - hops * f / 2)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_ranks_hold_what_the_literature_says(ranks: int, micro_batches: int) -> None:
    expected = {
        "gpipe": [micro_batches] * ranks,
        "1f1b": [min(ranks - rank, micro_batches) for rank in range(ranks)],
        "1f1b-overlap": [min(2 * (ranks - rank) - 1, micro_batches) for rank in range(ranks)],
        "breadth-first": [micro_batches] * ranks,
        "zb-h1": [ranks] * ranks,
    }
    if micro_batches >= 2 * ranks - 1:
        expected["zb-h2"] = [2 * ranks - 1] * ranks
    if micro_batches >= 2 * ranks:
        expected |= {"zb-v": [ranks] * ranks, "dualpipe-v": [ranks + 0.5] * ranks}
    for name, peaks in expected.items():
        chunks = 2 if name in ("breadth-first", "zb-v", "dualpipe-v") else 1
        assert run(SCHEDULES[name](ranks, micro_batches, chunks)).peaks == pytest.approx(peaks), name
    if micro_batches % ranks == 0 and micro_batches > ranks:
        for chunks in (1, 2, 3):
            one = run(interleaved(ranks, micro_batches, chunks))
            ahead = [2 * (ranks - 1 - rank) + (chunks - 1) * ranks + 1 for rank in range(ranks)]
            assert one.peaks == pytest.approx([chunk / chunks for chunk in ahead])


@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_zero_bubble_ranks_hold_less_where_weights_gradients_need_less(kept: float) -> None:
    """(p − i + 1)·M_B + (i − 1)·M_W for ZB-H1 and (2p − 2i + 1)·M_B + (2i − 2)·M_W for ZB-H2, i the rank counted from 1
    (Qi et al. 2024). Rank 0 is alone in putting no W off."""
    costs = even(4, kept=kept)
    assert simulate(zb_h1(4, 12), costs).peaks == pytest.approx([4 - r + r * kept for r in range(4)])
    assert simulate(zb_h2(4, 12), costs).peaks == pytest.approx([7 - 2 * r + 2 * r * kept for r in range(4)])


@pytest.mark.parametrize(
    ("name", "chunks", "makespan", "longest", "share", "peaks"),
    [
        ("gpipe", 1, 33, 33, 0.273, [8, 8, 8, 8]),
        ("1f1b", 1, 33, 33, 0.273, [4, 3, 2, 1]),
        ("interleaved", 2, 28.5, 28.5, 0.158, [5.5, 4.5, 3.5, 2.5]),
        ("breadth-first", 2, 28.5, 28.5, 0.158, [8, 8, 8, 8]),
        ("zb-h1", 1, 27, 27, 0.111, [4, 4, 4, 4]),
        ("zb-h2", 1, 27, 24, 0.111, [7, 7, 7, 7]),
        ("zb-v", 2, 25.5, 24, 0.059, [4, 4, 4, 4]),
        ("dualpipe-v", 2, 25.5, 25.5, 0.059, [4.5, 4.5, 4.5, 4.5]),
    ],
)
def test_the_numbers_of_four_ranks_and_eight_micro_batches(
    name: str, chunks: int, makespan: float, longest: float, share: float, peaks: list[float]
) -> None:
    one = run(SCHEDULES[name](4, 8, chunks))
    assert one.work == 24
    assert one.makespan == makespan
    assert max(one.lengths) == longest
    assert one.bubble_share == pytest.approx(share, abs=5e-4)
    assert one.bubble_per_work == pytest.approx(makespan / 24 - 1)
    assert one.bubble_within == longest - 24
    assert list(one.peaks) == peaks
    assert one.weight_versions == (1, 1, 1, 1)
    assert one.idle == (makespan - 24,) * 4


def test_by_hand_orders_lose_where_weights_gradients_are_short() -> None:
    times = (1.0, 1.5, 0.5)
    found = {name: run(SCHEDULES[name](4, 8, 2), times) for name in ("1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")}
    assert {name: extra(found[name]) for name in ("1f1b", "zb-h1", "zb-v", "dualpipe-v")} == {
        "1f1b": 9,
        "zb-h1": 6,
        "zb-v": 3,
        "dualpipe-v": 3.25,
    }
    assert found["zb-h2"].bubble_within == 4.5


@pytest.mark.parametrize("transfer", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(("ranks", "micro_batches"), list(product((4, 8), (8, 16, 32))))
def test_running_ahead_twice_as_far_hides_the_transfer_time(ranks: int, micro_batches: int, transfer: float) -> None:
    times = (1.0, 1.0, 1.0)
    least = 3 * micro_batches + (ranks - 1) * (3 + 2 * transfer)
    assert run(one_f_one_b(ranks, micro_batches, overlap=True), times, transfer).makespan == pytest.approx(least)
    assert run(one_f_one_b(ranks, micro_batches), times, transfer).makespan > least + transfer


@pytest.mark.parametrize(
    ("programs", "transfer", "makespan"),
    [
        (one_f_one_b(4, 16), 0.1, 59.8),
        (one_f_one_b(4, 16), 0.5, 71),
        (interleaved(4, 16), 0.0, 52.5),
        (interleaved(4, 16), 0.1, 53.9),
        (interleaved(4, 16), 1.0, 75.5),
    ],
)
def test_transfer_time_costs_what_others_have_found(programs: Programs, transfer: float, makespan: float) -> None:
    assert run(programs, TIMES[0], transfer).makespan == pytest.approx(makespan)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfer", [0.0, 0.25])
def test_whole_programs_take_as_long_as_their_passes(name: str, transfer: float) -> None:
    """Room is made early enough, and no drop is waited for longer than what follows it would be."""
    passes = SCHEDULES[name](3, 6, 2 if name in ("interleaved", "breadth-first", "zb-v", "dualpipe-v") else 1)
    alone, whole = run(passes, transfer=transfer), run(lower(passes), transfer=transfer)
    assert whole.makespan == pytest.approx(alone.makespan)
    assert whole.peaks == alone.peaks
    shown = [[span for span in one if span.stop > span.start] for one in whole.spans]
    for one, other in zip(shown, alone.spans, strict=True):
        assert [span.act for span in one] == [span.act for span in other]


def test_the_time_line_of_two_ranks() -> None:
    costs = Costs((1, 2), (3, 4), (5, 6), (1, 1), (1, 1), transfer=0.5)
    f, b = (lambda stage: Act(Op.FORWARD, stage, 0)), (lambda stage: Act(Op.BACKWARD, stage, 0))
    one = simulate(gpipe(2, 1), costs)
    assert one.spans == ((Span(f(0), 0, 1), Span(b(0), 14, 22)), (Span(f(1), 1.5, 3.5), Span(b(1), 3.5, 13.5)))
    assert one.busy == (9, 12)
    assert one.lengths == (22, 12)
    assert one.idle == (13, 10)
    (first, *_), second = simulate(lower(gpipe(2, 1)), costs).spans
    assert first == Span(f(0), 0, 1)
    assert [(str(act), start, stop) for act, start, stop in second] == [
        ("RA1.0<0", 0, 0),
        ("F1.0", 1.5, 3.5),
        ("B1.0", 3.5, 13.5),
        ("SG1.0>0", 13.5, 13.5),
        ("R1", 13.5, 13.5),
        ("DG1.0>0", 14, 14),
        ("N", 14, 14),
        ("U", 14, 14),
    ]


def test_a_tensor_moves_when_there_is_room_for_it() -> None:
    """Rank 1 makes room for micro-batch 1 after a pass that begins when it has long been sent."""
    costs = replace(even(2), forward=(1.0, 5.0), transfer=2.0)
    first, second = lower(forward_only((0, 1), 2))
    late = Act(Op.RECEIVE_ACTIVATION, 1, 1, 0)
    order = [act for act in second.actions if act != late]
    order.insert(len(order) - 1, late)
    spans = simulate([first, replace(second, actions=tuple(order))], costs).spans[1]
    assert [span.start for span in spans if span.act.op is Op.FORWARD] == [3, 10]
    assert simulate(lower(forward_only((0, 1), 2)), costs).spans[1][-1] == Span(Act(Op.FORWARD, 1, 1), 8, 13)


def test_tensors_between_passes_count_where_their_size_is_given() -> None:
    """Worked out by hand. Rank 0: F (10) and its output (1), the room for a gradient (1). Rank 1: its input (1) becomes
    part of what F holds (10); the gradient that B makes (1) comes on top of it."""
    costs = replace(even(2), held=(10.0, 10.0), boundary=(1.0, 1.0))
    assert simulate(lower(gpipe(2, 1)), costs).peaks == (12, 11)
    # On one rank: both hold 10, and what F0 made is part of what F1 holds; then the gradient between them.
    assert simulate([Program((0, 1), 1, _ACTS)], costs).peaks == (21,)
    assert simulate(lower([Program((0, 1), 1, _ACTS)]), costs).peaks == (21,)


_ACTS = tuple(Act(op, stage, 0) for op, stage in ((Op.FORWARD, 0), (Op.FORWARD, 1), (Op.BACKWARD, 1), (Op.BACKWARD, 0)))


def test_ranks_that_wait_for_each_other_have_no_time_line() -> None:
    first, second = gpipe(2, 1)
    with pytest.raises(AssertionError, match="deadlock"):
        simulate([replace(first, actions=first.actions[::-1]), second], even(2))
