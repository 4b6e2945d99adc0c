"""What can be wrong with the programs of a pipeline, found before any of them runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from shoal.pipeline.program import DROP, RECEIVE, SEND, Act, Op, Program, giver, placement, taker

_PASS = {op: one for kinds in (SEND, RECEIVE) for one, op in kinds.items()}


def faults(programs: Sequence[Program], *, train: bool = True) -> list[str]:
    """What makes the programs of all ranks invalid together; empty for valid ones.

    - *Placement:* each stage has one rank.
    - *Completeness:* each stage takes every micro-batch forward once and, when it trains, backward once; what crosses
      from rank to rank is sent, received and dropped once; a stage is reduced once, and each rank takes the norm and
      updates once. There is nothing else.
    - *Order on a rank:* a pass comes after what it takes in, and its result leaves after it; a stage is reduced after
      its last backward pass, the norm follows all reductions and drops, and the update the norm.
    - *One order a channel:* what a rank sends another, of activations or of gradients, it sends in the order in which
      the other receives it, which is all that a transport without tags has to go by. A header has the place before its
      activation at both ends: what is to be received after an activation of unknown form waits for that form
      (:mod:`shoal.pipeline.mail`).
    - *No deadlock:* no circle of actions wait for each other.
    """
    if found := _misplaced(programs):
        return found  # without a rank for each stage, nothing else has a meaning
    home = placement(programs)
    for rank, program in enumerate(programs):
        found += [f"rank {rank}: {fault}" for fault in _faults_of_one(rank, program, home, train)]
    # What waits for what can only be followed when everything is there.
    return found or [*_disordered(programs), *_deadlocked(programs)]


def _misplaced(programs: Sequence[Program]) -> list[str]:
    holders = Counter(stage for program in programs for stage in program.stages)
    stages = range(max(holders, default=0) + 1)
    found = [f"stage {stage} is on {holders[stage]} ranks" for stage in stages if holders[stage] != 1]
    if len(counts := {program.micro_batches for program in programs}) > 1:
        found.append(f"ranks differ in the number of micro-batches: {sorted(counts)}")
    return found


def _faults_of_one(rank: int, program: Program, home: Sequence[int], train: bool) -> Iterator[str]:
    where = {act: at for at, act in enumerate(program.actions)}
    if len(where) < len(program.actions):
        yield "an action occurs twice"
    order = list(_orders(rank, program, home, train))
    wanted = {act for pair in order for act in pair}
    yield from (f"{act} is missing" for act in _sorted(wanted - where.keys()))
    yield from (f"{act} does not belong here" for act in _sorted(where.keys() - wanted))
    for first, second in order:
        if first in where and second in where and where[first] > where[second]:
            yield f"{first} must come before {second}"


def _orders(rank: int, program: Program, home: Sequence[int], train: bool) -> Iterator[tuple[Act, Act]]:
    """Every action that a rank must have, in pairs of which the first must come before the second."""
    for stage in program.stages:
        for micro_batch in range(program.micro_batches):
            forward = Act(Op.FORWARD, stage, micro_batch)
            backward = forward._replace(op=Op.BACKWARD)
            yield from _around(forward, rank, home, train)
            if train:
                yield forward, backward
                yield from _around(backward, rank, home, train)
                yield backward, Act(Op.REDUCE, stage)
        if train:
            yield Act(Op.REDUCE, stage), Act(Op.NORM)
    if train:
        yield Act(Op.NORM), Act(Op.UPDATE)


def _around(one: Act, rank: int, home: Sequence[int], train: bool) -> Iterator[tuple[Act, Act]]:
    """What a pass takes in comes before it, what becomes of its result after it."""
    yield one, one
    if source := giver(one, len(home)):
        if (peer := home[source.stage]) == rank:
            yield source, one
        else:
            received = one._replace(op=RECEIVE[one.op], peer=peer)
            yield received, one
            if one.op is Op.BACKWARD:
                yield one._replace(op=Op.FORWARD), received  # the gradient of an output has its shape
    if (target := taker(one, len(home))) and (peer := home[target.stage]) != rank:
        sent = one._replace(op=SEND[one.op], peer=peer)
        yield one, sent
        yield sent, (dropped := sent._replace(op=DROP[sent.op]))
        if train:
            yield dropped, Act(Op.NORM)


def _disordered(programs: Sequence[Program]) -> Iterator[str]:
    """Where the two ends of a channel, from rank to rank for activations or for gradients, disagree about the order."""
    sent: dict[tuple[int, int, Op], list[Act]] = defaultdict(list)
    received: dict[tuple[int, int, Op], list[Act]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for act in program.actions:
            if act.op in SEND.values():
                answer = _answer(act, rank)
                sent[rank, act.peer, answer.op].append(answer)
            elif act.op in RECEIVE.values():
                received[act.peer, rank, act.op].append(act)
    for (source, to, op), messages in sent.items():
        for ours, theirs in zip(messages, received[source, to, op], strict=True):
            if ours != theirs:
                yield f"rank {to}: {theirs} comes where rank {source} sends for {ours}"
                break


def _deadlocked(programs: Sequence[Program]) -> Iterator[str]:
    """A circle of waits: a pass waits for what it takes in, a drop for room on the other side.

    Sends wait for nothing, and neither do receives, which only make room. For an activation of unknown form they cannot
    even do that: it has room at the latest when its pass begins, which is what its drop waits for. The norm waits for
    all ranks, but all that they can wait for comes before it.
    """
    graph: TopologicalSorter[tuple[int, Act]] = TopologicalSorter()
    for rank, program in enumerate(programs):
        for earlier, later in pairwise(program.actions):
            graph.add((rank, later), (rank, earlier))
        for act in program.actions:
            if act.op in SEND.values():
                answer = _answer(act, rank)
                needed = answer._replace(op=_PASS[answer.op], peer=-1)
                graph.add((act.peer, needed), (rank, act))
                room = needed if needed.op is Op.FORWARD else answer
                graph.add((rank, act._replace(op=DROP[act.op])), (act.peer, room))
    try:
        graph.prepare()
    except CycleError as error:
        waits = [(later, earlier) for earlier, later in pairwise(error.args[1]) if earlier[0] != later[0]]
        yield "deadlock: " + ", ".join(
            f"rank {a}'s {act} waits for rank {b}'s {other}" for (a, act), (b, other) in waits
        )


def _answer(sent: Act, rank: int) -> Act:
    """What the other rank does to receive what ``rank`` sends."""
    one = _PASS[sent.op]
    step = 1 if one is Op.FORWARD else -1
    return Act(RECEIVE[one], sent.stage + step, sent.micro_batch, rank)


def _sorted(acts: Iterable[Act]) -> list[Act]:
    return sorted(acts, key=lambda act: (act.op.value, *act[1:]))
