from __future__ import annotations

from itertools import product

import pytest

from shoal.layout.kinds import SCHEDULES as ADMITTED
from shoal.pipeline.faults import faults
from shoal.pipeline.lower import lower
from shoal.pipeline.program import PASSES, STARTS, Op, Programs
from shoal.pipeline.schedules.pipedream import pipedream, pipedream_vertical
from shoal.pipeline.schedules.two_bw import two_bw
from shoal.pipeline.simulate import even, simulate
from shoal.pipeline.stream import STREAMS
from shoal.pipeline.versions import live_versions, versions_used

CASES = [
    (name, ranks, micro_batches)
    for name in STREAMS
    for ranks in range(1, 6)
    for micro_batches in range(1, 2 * ranks + 1)
    if ADMITTED[name].admits(ranks, micro_batches)
]


def text(programs: Programs) -> list[str]:
    """The programs without their stages: T0 F0 B0."""
    return [
        " ".join(f"{act.op.value}{act.micro_batch if act.micro_batch >= 0 else ''}" for act in program.actions)
        for program in programs
    ]


def test_pipedream_updates_after_every_backward_pass() -> None:
    """RNU stands for the reduction, norm and update of the micro-batch just taken backward."""
    short = text(pipedream(3, 2, 2))
    for b in range(4):
        short = [line.replace(f"B{b} R{b} N{b} U{b}", f"B{b} RNU") for line in short]
    assert short == [
        "T0 F0 F1 T2 F2 B0 RNU F3 B1 RNU D B2 RNU B3 RNU",
        "T0 F0 F1 B0 RNU T2 F2 B1 RNU F3 B2 RNU D B3 RNU",
        "T0 F0 B0 RNU F1 B1 RNU T2 F2 B2 RNU F3 B3 RNU D",
    ]


def test_vertical_sync_is_pipedream_with_older_weights_on_later_ranks() -> None:
    """The same actions, so nothing more is sent: rank r has made r updates more than the first rank had, or what there
    were."""
    programs = pipedream_vertical(3, 2, 3)
    assert text(programs) == text(pipedream(3, 2, 3))
    assert [one.ages for one in programs] == [(0, 0, 0, 0, 0, 0), (0, 0, 1, 1, 1, 1), (0, 1, 2, 2, 2, 2)]


def test_2bw_updates_when_the_batch_after_the_next_begins() -> None:
    assert text(two_bw(3, 2, 3)) == [
        "T0 F0 F1 T2 F2 B0 F3 B1 R0 N0 T4 U0 F4 B2 F5 B3 R2 N2 D U2 B4 B5 R4 N4 U4",
        "T0 F0 F1 B0 T2 F2 B1 R0 F3 N0 B2 T4 U0 F4 B3 R2 F5 N2 B4 D U2 B5 R4 N4 U4",
        "T0 F0 B0 F1 B1 R0 T2 F2 B2 N0 F3 B3 R2 T4 U0 F4 B4 N2 F5 B5 R4 D U2 N4 U4",
    ]


def test_a_stream_shorter_than_the_pipeline_drains_what_it_has() -> None:
    assert text(pipedream(4, 1, 2))[0] == "T0 F0 T1 F1 D B0 R0 N0 U0 B1 R1 N1 U1"
    assert text(two_bw(2, 1, 1)) == ["T0 F0 D B0 R0 N0 U0", "T0 F0 B0 R0 D N0 U0"]


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), CASES)
def test_streams_of_any_length_are_valid_and_use_the_versions_that_their_recurrences_say(
    name: str, ranks: int, micro_batches: int
) -> None:
    for steps in (1, 2, 3, 3 * ranks // micro_batches + 2):
        passes = STREAMS[name](ranks, micro_batches, steps)
        programs = lower(passes)
        assert faults(programs) == []
        for rank, (before, program) in enumerate(zip(passes, programs, strict=True)):
            own = set(PASSES | STARTS | {Op.REDUCE, Op.NORM, Op.UPDATE})
            assert tuple(act for act in program.actions if act.op in own) == before.actions
            numbers = range(steps * micro_batches)
            late = ranks - 1 - rank
            assert program.ages == before.ages
            if name == "pipedream":
                assert versions_used(program) == [max(0, b - late) for b in numbers]
            elif name == "pipedream-vertical":
                assert versions_used(program) == [max(0, b - ranks + 1) for b in numbers]
            else:
                assert versions_used(program) == [max(0, b // micro_batches - 1) for b in numbers]


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), CASES)
def test_as_many_versions_are_alive_as_the_literature_says(name: str, ranks: int, micro_batches: int) -> None:
    """Of 2BW the last rank has but one: it updates when it has no micro-batch in flight. With vertical sync later ranks
    keep, for micro-batches that are still on their way to them, what the first keeps for those in flight."""
    programs = STREAMS[name](ranks, micro_batches, 3 * ranks // micro_batches + 3)
    each = [ranks - rank for rank in range(ranks)]
    live = {"pipedream": each, "pipedream-vertical": [ranks] * ranks, "2bw": [min(2, own) for own in each]}[name]
    assert [live_versions(program) for program in programs] == live
    assert list(simulate(lower(programs), even(ranks)).weight_versions) == live
    assert list(simulate(programs, even(ranks)).peaks) == [float(own) for own in each]


@pytest.mark.parametrize(("ranks", "micro_batches"), [case[1:] for case in CASES if case[0] == "2bw"])
def test_2bw_takes_the_norm_half_way_between_a_reduction_and_its_update(ranks: int, micro_batches: int) -> None:
    for rank, program in enumerate(two_bw(ranks, micro_batches, 5)):
        ops = [(act.op, act.micro_batch) for act in program.actions]
        for first in range(0, 4 * micro_batches, micro_batches):
            reduced, normed, updated = (ops.index((op, first)) for op in (Op.REDUCE, Op.NORM, Op.UPDATE))
            before, after = (sum(op in PASSES for op, _ in part) for part in (ops[reduced:normed], ops[normed:updated]))
            assert before == after == micro_batches - (ranks - 1 - rank)


@pytest.mark.parametrize(("name", "ranks"), list(product(STREAMS, range(1, 6))))
def test_without_a_flush_there_is_no_bubble_between_the_first_and_the_last_pass_of_full_steps(
    name: str, ranks: int
) -> None:
    """More steps cost no more than their work: the bubble is that of one fill and one drain."""
    idle = [simulate(STREAMS[name](ranks, ranks, steps), even(ranks)).idle for steps in (1, 8)]
    assert idle[0] == pytest.approx(idle[1])
