from __future__ import annotations

import pytest
from pipeline_ranks import breadth_first

from shoal.pipeline.faults import faults
from shoal.pipeline.lower import lower
from shoal.pipeline.program import DROP, RECEIVE, SEND, Act, Op, Program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.forward_only import forward_only
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.pipeline.schedules.zb_h1 import zb_h1
from shoal.pipeline.schedules.zb_v import zb_v

PASSES = (Op.FORWARD, Op.BACKWARD)


def test_1f1b_over_three_ranks_is_lowered_to_this() -> None:
    """Worked out by hand: what is sent right after its pass, received one pass ahead, and dropped once known to be
    there, at the latest before the norm. Rank 1 has taken micro-batches 0 and 1 before it sends its first gradient."""
    first, second, third = map(str, lower(one_f_one_b(3, 3)))
    assert first == (
        "F0.0 SA0.0>1 F0.1 SA0.1>1 RG0.0<1 F0.2 SA0.2>1 RG0.1<1 DA0.0>1 DA0.1>1 B0.0 RG0.2<1 DA0.2>1 B0.1 B0.2 R0 N U"
    )
    assert second == (
        "RA1.0<0 RA1.1<0 F1.0 SA1.0>2 RG1.0<2 F1.1 SA1.1>2 RA1.2<0 DA1.0>2 B1.0 SG1.0>0 RG1.1<2 F1.2 SA1.2>2 "
        "RG1.2<2 DA1.1>2 B1.1 SG1.1>0 DA1.2>2 B1.2 SG1.2>0 R1 DG1.0>0 DG1.1>0 DG1.2>0 N U"
    )
    assert third == (
        "RA2.0<1 F2.0 RA2.1<1 B2.0 SG2.0>1 F2.1 RA2.2<1 B2.1 SG2.1>1 DG2.0>1 F2.2 B2.2 SG2.2>1 R2 DG2.1>1 DG2.2>1 N U"
    )


@pytest.mark.parametrize("passes", [one_f_one_b(4, 8), gpipe(3, 4), one_f_one_b(4, 2), breadth_first((0, 1, 0, 1), 3)])
def test_the_passes_stay_as_they_are_and_no_gradient_is_expected_before_its_form_is_known(
    passes: tuple[Program, ...],
) -> None:
    for program, lowered in zip(passes, lower(passes), strict=True):
        assert tuple(act for act in lowered.actions if act.op in PASSES) == program.actions
        seen = set()
        for at, act in enumerate(lowered.actions):
            if act.op in RECEIVE.values():
                consumer = act._replace(op=PASSES[act.op is Op.RECEIVE_GRADIENT], peer=-1)
                between = [one for one in lowered.actions[at : lowered.actions.index(consumer)] if one.op in PASSES]
                assert len(between) <= 1, f"{act} is more than one pass ahead"
                assert act.op is Op.RECEIVE_ACTIVATION or consumer._replace(op=Op.FORWARD) in seen
            seen.add(act)


def waiting(program: Program, sends: Op) -> int:
    """The most messages of one kind that are sent and not yet dropped at one moment."""
    most = live = 0
    for act in program.actions:
        live += (act.op is sends) - (act.op is DROP[sends])
        most = max(most, live)
    assert live == 0
    return most


@pytest.mark.parametrize("micro_batches", [4, 32])
def test_1f1b_keeps_no_more_sent_tensors_for_more_micro_batches(micro_batches: int) -> None:
    programs = lower(one_f_one_b(4, micro_batches))
    assert [waiting(program, Op.SEND_ACTIVATION) for program in programs] == [4, 3, 2, 0]
    assert [waiting(program, Op.SEND_GRADIENT) for program in programs] == [0, 4, 3, 2]


def test_forward_passes_alone_have_no_end_of_a_step() -> None:
    ops = {act.op for program in lower(forward_only((0, 1, 2), 2)) for act in program.actions}
    assert ops == {Op.FORWARD, Op.SEND_ACTIVATION, Op.RECEIVE_ACTIVATION, Op.DROP_ACTIVATION}


def test_a_result_proves_that_what_its_own_pass_took_in_was_received() -> None:
    first, second = map(str, lower(forward_only((0, 1, 0, 1), 2)))
    assert (
        first == "F0.0 SA0.0>1 RA2.0<1 F0.1 SA0.1>1 RA2.1<1 DA0.0>1 F2.0 SA2.0>1 DA0.1>1 F2.1 SA2.1>1 DA2.0>1 DA2.1>1"
    )
    assert second == "RA1.0<0 RA1.1<0 F1.0 SA1.0>0 RA3.0<0 F1.1 SA1.1>0 RA3.1<0 DA1.0>0 F3.0 DA1.1>0 F3.1"


def test_a_gradient_leaves_before_the_weights_get_theirs() -> None:
    """Worked out by hand. The stage is reduced after its last weight-gradient pass."""
    first, second = map(str, lower(zb_h1(2, 2)))
    assert first == "F0.0 SA0.0>1 RG0.0<1 F0.1 SA0.1>1 DA0.0>1 I0.0 RG0.1<1 W0.0 DA0.1>1 I0.1 W0.1 R0 N U"
    assert second == "RA1.0<0 F1.0 RA1.1<0 I1.0 SG1.0>0 F1.1 I1.1 SG1.1>0 W1.0 W1.1 R1 DG1.0>0 DG1.1>0 N U"


def test_at_the_turn_of_a_v_nothing_moves_and_elsewhere_both_ways() -> None:
    programs = lower(zb_v(3, 6))
    sends = [[act for act in one.actions if act.op in SEND.values()] for one in programs]
    ways = [sorted({(act.op.value, act.stage, act.peer) for act in one}) for one in sends]
    assert ways == [
        [("SA", 0, 1), ("SG", 5, 1)],
        [("SA", 1, 2), ("SA", 4, 0), ("SG", 1, 0), ("SG", 4, 2)],
        [("SA", 3, 1), ("SG", 2, 1)],
    ]
    reduced = [[act.stage for act in one.actions if act.op is Op.REDUCE] for one in programs]
    assert reduced == [[5, 0], [4, 1], [3, 2]]


def test_what_is_sent_first_has_room_first_whatever_is_taken_first() -> None:
    """Rank 0 sends for stage 3 before it sends for stage 1 again; rank 1 takes them the other way round."""
    orders = ("F0.0 F2.0 F0.1 F2.1", "F1.0 F1.1 F3.0 F3.1")
    acts = [[Act(Op.FORWARD, *map(int, word[1:].split("."))) for word in order.split()] for order in orders]
    programs = lower([Program((rank, rank + 2), 2, tuple(order)) for rank, order in enumerate(acts)])
    assert faults(programs, train=False) == []
    assert str(programs[1]).startswith("RA1.0<0 RA3.0<0 RA1.1<0 F1.0 SA1.0>0 ")


def rooms(program: Program) -> int:
    """The most messages at one moment that there is room for and no pass has taken in."""
    most, open_ = 0, set[tuple[Op, int, int]]()
    for op, stage, number, _ in program.actions:
        if op in RECEIVE.values():
            open_.add((op, stage, number))
        elif op in RECEIVE:
            open_.discard((RECEIVE[op], stage, number))
        most = max(most, len(open_))
    assert not open_
    return most


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "list"])
@pytest.mark.parametrize("micro_batches", [8, 16])
def test_there_is_room_for_what_the_next_two_passes_need_and_no_more(name: str, micro_batches: int) -> None:
    assert max(map(rooms, lower(SCHEDULES[name](4, micro_batches, 2)))) == 2


def test_what_stays_on_a_rank_is_neither_sent_nor_received() -> None:
    tip, ends = lower(breadth_first((0, 1, 1, 0), 2))[1], lower(breadth_first((0, 0), 2))[0]
    assert {act.stage for act in tip.actions if act.op is Op.SEND_ACTIVATION} == {2}
    assert {act.stage for act in tip.actions if act.op is Op.SEND_GRADIENT} == {1}
    assert not [act for act in ends.actions if act.op in SEND.values() or act.op in RECEIVE.values()]
