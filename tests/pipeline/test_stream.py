from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from shoal.layout.kinds import SCHEDULES as ADMITTED
from shoal.pipeline.faults import faults
from shoal.pipeline.lower import lower
from shoal.pipeline.program import DROP, SEND, Act, Op, Program, Programs
from shoal.pipeline.stream import STREAMS, Stream
from shoal.pipeline.turns import answer
from shoal.pipeline.versions import versions_used

CASES = [
    (name, ranks, micro_batches)
    for name in STREAMS
    for ranks in range(1, 6)
    for micro_batches in range(1, 2 * ranks + 1)
    if ADMITTED[name].admits(ranks, micro_batches)
]


def test_a_stream_of_2bw_is_cut_into_this() -> None:
    """Worked out by hand for the first of two ranks. A step opens its own receives after it begins, drops and takes
    backward what earlier ones have sent, and updates for the batch before the last."""
    stream = Stream("2bw", 2, 0, 2)
    assert [str(stream.step(k)) for k in range(3)] == [
        "T.0 F0.0 SA0.0>1 RG0.0<1 F0.1 SA0.1>1 DA0.0>1 B0.0",
        "T.0 RG0.-1<1 F0.0 SA0.0>1 DA0.-1>1 B0.-1 R0.-2 RG0.0<1 F0.1 SA0.1>1 N.-2 DA0.0>1 B0.0",
        "T.0 U.-4 RG0.-1<1 F0.0 SA0.0>1 DA0.-1>1 B0.-1 R0.-2 RG0.0<1 F0.1 SA0.1>1 N.-2 DA0.0>1 B0.0",
    ]
    assert str(stream.drain(1)) == "RG0.-1<1 DA0.-1>1 B0.-1 R0.-2 N.-2 U.-2"
    assert str(stream.drain(3)) == "RG0.-1<1 U.-4 DA0.-1>1 B0.-1 R0.-2 N.-2 U.-2"


def test_a_stream_of_pipedream_is_cut_into_this() -> None:
    stream = Stream("pipedream", 2, 1, 1)
    assert [str(stream.step(k)) for k in range(3)] == [
        "T.0 RA1.0<0 F1.0 B1.0 SG1.0>0 R1.0 N.0 U.0",
        "T.0 RA1.0<0 F1.0 B1.0 SG1.0>0 R1.0 N.0 U.0",
        "T.0 RA1.0<0 DG1.-2>0 F1.0 B1.0 SG1.0>0 R1.0 N.0 U.0",
    ]
    assert str(stream.drain(3)) == "DG1.-2>0 DG1.-1>0"


def since_the_beginning(program: Program, step: int) -> Iterator[Act]:
    """The actions of a step or drain, counted from the first micro-batch of the stream."""
    return (act._replace(micro_batch=act.micro_batch + step * program.micro_batches) for act in program.actions)


@pytest.mark.parity
@pytest.mark.parametrize(("name", "ranks", "micro_batches"), CASES)
def test_a_step_does_not_depend_on_how_many_follow(name: str, ranks: int, micro_batches: int) -> None:
    """Whole streams, lowered as such, are their steps and their drain, of any length: also the steps and drains that
    are one object because they repeat."""
    streams = [Stream(name, ranks, rank, micro_batches) for rank in range(ranks)]
    for steps in range(1, (ranks + 1) // micro_batches + 5):
        for stream, whole in zip(streams, lower(STREAMS[name](ranks, micro_batches, steps)), strict=True):
            parts = [act for k in range(steps) for act in since_the_beginning(stream.step(k), k)]
            parts += since_the_beginning(stream.drain(steps), steps)
            assert sum((stream.step(k).ages for k in range(steps)), ()) == whole.ages
            assert parts == [act for act in whole.actions if act.op is not Op.DRAIN]


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), CASES)
def test_steps_and_drains_repeat(name: str, ranks: int, micro_batches: int) -> None:
    stream = Stream(name, ranks, 0, micro_batches)
    assert stream.step(1000) is stream.step(ranks + 2)
    assert stream.drain(1000) is stream.drain(ranks + 2)
    for k in range(ranks + 3):
        assert stream.step(k).actions[0] == Act(Op.BEGIN, micro_batch=0)
        assert [act.op for act in stream.step(k).actions].count(Op.BEGIN) == 1


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), CASES)
def test_nothing_is_left_on_its_way_where_the_last_update_is_made(name: str, ranks: int, micro_batches: int) -> None:
    for whole in lower(STREAMS[name](ranks, micro_batches, 4)):
        last = max(at for at, act in enumerate(whole.actions) if act.op is Op.UPDATE)
        left = [act for act in whole.actions[last:] if act.op in DROP.values()]
        # The last rank of PipeDream updates within a step; what it has sent is dropped in the drain.
        assert not left or (ADMITTED[name].per_micro_batch and whole.stages == (ranks - 1,))


# --- what is wrong with a stream ---


def changed(programs: Programs, rank: int, actions: Sequence[Act]) -> Programs:
    return tuple(replace(one, actions=tuple(actions)) if at == rank else one for at, one in enumerate(programs))


def moved(programs: Programs, rank: int, act: str, before: str) -> Programs:
    """``act`` of a rank, moved to just before another of its actions."""
    order = {str(one): one for one in programs[rank].actions}
    names = [name for name in order if name != act]
    names.insert(names.index(before), act)
    return changed(programs, rank, [order[name] for name in names])


BATCHES = lower(STREAMS["2bw"](3, 2, 3))
SINGLES = lower(STREAMS["pipedream"](3, 2, 2))
VERTICAL = lower(STREAMS["pipedream-vertical"](3, 2, 3))


@pytest.mark.parametrize("programs", [BATCHES, SINGLES])
@pytest.mark.parametrize("rank", range(3))
def test_any_missing_repeated_or_strange_action_is_found(programs: Programs, rank: int) -> None:
    actions = programs[rank].actions
    for at, act in enumerate(actions):
        assert f"rank {rank}: {act} is missing" in faults(changed(programs, rank, actions[:at] + actions[at + 1 :]))
        assert f"rank {rank}: an action occurs twice" in faults(changed(programs, rank, (*actions, act)))
    for stranger in (Act(Op.NORM), Act(Op.UPDATE), Act(Op.REDUCE, rank), Act(Op.REDUCE, rank, 1000)):
        found = faults(changed(programs, rank, (*actions, stranger)))
        assert f"rank {rank}: {stranger} does not belong here" in found


@pytest.mark.parametrize(
    ("rank", "act", "before", "fault"),
    [
        (1, "R1.0", "B1.1", "B1.1 must come before R1.0"),
        (1, "N.0", "R1.0", "R1.0 must come before N.0"),
        (1, "U.0", "N.0", "N.0 must come before U.0"),
        (2, "U.2", "U.0", "U.0 must come before U.2"),
        (2, "N.2", "N.0", "N.0 must come before N.2"),
        (1, "RA1.2<0", "T.2", "T.2 must come before RA1.2<0"),
        (0, "F0.2", "T.2", "T.2 must come before F0.2"),
        (0, "T.4", "F0.3", "F0.3 must come before T.4"),
        (0, "T.4", "T.2", "T.2 must come before T.4"),
        (0, "D", "F0.5", "F0.5 must come before D"),
    ],
)
def test_an_action_that_comes_too_early_is_found(rank: int, act: str, before: str, fault: str) -> None:
    assert faults(BATCHES) == []
    assert f"rank {rank}: {fault}" in faults(moved(BATCHES, rank, act, before))


def test_a_backward_pass_after_its_update_is_found_also_where_no_update_follows() -> None:
    """Without the last update on any rank, its micro-batch belongs to the batch before."""
    ends = {Act(op, stage, 3) for op in (Op.REDUCE, Op.NORM, Op.UPDATE) for stage in (-1, 0, 1, 2)}
    without = [replace(one, actions=tuple(act for act in one.actions if act not in ends)) for one in SINGLES]
    assert [f"rank {rank}: B{rank}.3 must come before R{rank}.2" for rank in range(3)] == faults(without)


def test_ranks_that_wait_for_each_other_over_a_norm_are_found() -> None:
    """Rank 1 updates for batch 0 before it sends a gradient that rank 0 wants before its norm."""
    programs = lower(STREAMS["2bw"](2, 2, 3))
    late = moved(programs, 0, "N.0", "U.0")
    assert faults(late) == []
    early = moved(moved(late, 1, "N.0", "T.2"), 1, "U.0", "T.2")
    (fault,) = faults(early)
    assert fault.startswith("deadlock: ")
    assert "rank 1's U.0 waits for rank 0's N.0" in fault
    assert "rank 0's B0.2 waits for rank 1's SG1.2>0" in fault or "rank 0's DA0.2>1 waits for" in fault


def test_a_micro_batch_that_meets_another_version_on_another_rank_is_found() -> None:
    """Where it is to meet one: an update that a forward pass overtakes, and an age that is not that of its place."""
    assert [one.ages for one in VERTICAL] == [(0,) * 6, (0, 0, 1, 1, 1, 1), (0, 1, 2, 2, 2, 2)]
    late = moved(VERTICAL, 1, "U.1", "B1.2")
    assert faults(late) == ["rank 1: micro-batch 3 uses version 0 of the weights, on rank 0 1"]
    young = (VERTICAL[0], VERTICAL[1], replace(VERTICAL[2], ages=(0, 1, 1, 2, 2, 2)))
    assert faults(young) == ["rank 2: micro-batch 2 uses version 1 of the weights, on rank 0 0"]
    early = (replace(VERTICAL[0], ages=(1,) * 6), *VERTICAL[1:])
    assert faults(early)[0] == "rank 0: micro-batch 0 uses version -1 of the weights, on rank 0 -1"
    without = tuple(replace(one, ages=()) for one in VERTICAL)
    assert faults(without) == []


def test_ages_repeat_and_the_oldest_is_known() -> None:
    for rank in range(4):
        stream = Stream("pipedream-vertical", 4, rank, 2)
        assert stream.step(0).ages == (0, max(0, rank - 2))
        assert stream.step(9).ages == (rank, rank)
        assert stream.drain(9).ages == ()
        assert stream.oldest == rank
    assert Stream("2bw", 4, 3, 3).oldest == Stream("pipedream", 4, 3, 1).oldest == 0


def ends(programs: Programs) -> bool:
    """Whether all ranks come to their ends: by trying each again and again, with nothing shared with the validator but
    the names of messages."""
    done: list[list[Act]] = [[] for _ in programs]

    def may(act: Act, rank: int) -> bool:
        if act.op is Op.UPDATE:
            return all(Act(Op.NORM, micro_batch=act.micro_batch) in other for other in done)
        if act.op is Op.NORM:
            return all(Act(Op.REDUCE, at, act.micro_batch) in other for at, other in enumerate(done))
        if act.op in DROP.values():
            return answer(act, rank) in done[act.peer]
        if act.op is Op.FORWARD and rank > 0:
            return Act(SEND[act.op], rank - 1, act.micro_batch, rank) in done[rank - 1]
        if act.op is Op.BACKWARD and rank < len(programs) - 1:
            return Act(SEND[act.op], rank + 1, act.micro_batch, rank) in done[rank + 1]
        return True

    while True:
        left = [(rank, program.actions[len(done[rank])]) for rank, program in enumerate(programs)
                if len(done[rank]) < len(program.actions)]  # fmt: skip
        going = [(rank, act) for rank, act in left if may(act, rank)]
        if not going:
            return not left
        for rank, act in going:
            done[rank].append(act)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_with_actions_moved_at_random_is_refused_or_right(name: str) -> None:
    generator, accepted = random.Random(0), 0
    programs = lower(STREAMS[name](3, 2, 3))
    for _ in range(500):
        found = programs
        for _ in range(generator.randint(1, 2)):
            rank = generator.randrange(3)
            actions = list(found[rank].actions)
            at = generator.randrange(len(actions))
            act = actions.pop(at)
            actions.insert(max(0, at + generator.randint(-6, 6)), act)
            found = changed(found, rank, actions)
        if not faults(found):
            accepted += found != programs
            assert ends(found)
            for program in found:
                order = list(program.actions)
                for number in range(6):
                    first = number if ADMITTED[name].per_micro_batch else number // 2 * 2
                    backward, update = (order.index(Act(Op.BACKWARD, program.stages[0], number)),
                                        order.index(Act(Op.UPDATE, micro_batch=first)))  # fmt: skip
                    assert backward < update
                assert versions_used(program) == sorted(versions_used(program))
            if name == "pipedream-vertical":
                assert all(versions_used(program) == versions_used(found[0]) for program in found)
    assert accepted > 50
