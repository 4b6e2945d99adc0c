"""What can be wrong with the programs of a pipeline, found before any of them runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from shoal.pipeline.program import DROP, RECEIVE, SEND, Act, Op, Program, giver, is_stream, named, placement, taker
from shoal.pipeline.turns import answer, awaited_by_whole, in_turn, with_collectives
from shoal.pipeline.versions import versions_used

_SENDS, _RECEIVES = set(SEND.values()), set(RECEIVE.values())


def faults(programs: Sequence[Program], *, train: bool = True) -> list[str]:
    """What makes the programs of all ranks invalid together; empty for valid ones.

    - *Placement:* each stage has one rank.
    - *Completeness:* each stage takes every micro-batch forward once and, when it trains, backward once, as a whole or
      in two, for the input and for the weights; what crosses from rank to rank is sent, received and dropped once; a
      stage is reduced once, and each rank takes the norm and updates once; in a stream once a batch, which reaches from
      the number that its update carries to that of the next. There is nothing else.
    - *Order on a rank:* a pass comes after what it takes in, and its result leaves after it; weights' gradients come
      after the input's; a stage is reduced after its last backward pass, the norm follows all reductions and drops, and
      the update the norm. In a stream drops may come later, and norms and updates have the order of their batches; a
      step begins before anything of it, and it and the drain after all forward passes of the steps before.
    - *One order a channel:* what a rank sends another, of activations or of gradients, it sends in the order in which
      the other receives it, which is all that a transport without tags has to go by. A header has the place before its
      activation at both ends: what is to be received after an activation of unknown form waits for that form
      (:mod:`shoal.pipeline.mail`).
    - *One version a micro-batch:* where weights are said to be older than the newest (vertical sync), a micro-batch
      meets the same version on all ranks, and one that is there.
    - *No deadlock:* no circle of actions wait for each other.
    """
    if found := _misplaced(programs):
        return found  # without a rank for each stage, nothing else has a meaning
    home, parts = placement(programs), _Parts.of(programs)
    for rank, program in enumerate(programs):
        found += [f"rank {rank}: {fault}" for fault in _faults_of_one(rank, program, home, train, parts)]
    # What waits for what can only be followed when everything is there.
    return found or [*_disordered(programs), *_torn(programs), *_deadlocked(programs)]


def _misplaced(programs: Sequence[Program]) -> list[str]:
    holders = Counter(stage for program in programs for stage in program.stages)
    stages = range(max(holders, default=0) + 1)
    found = [f"stage {stage} is on {holders[stage]} ranks" for stage in stages if holders[stage] != 1]
    if len(counts := {program.micro_batches for program in programs}) > 1:
        found.append(f"ranks differ in the number of micro-batches: {sorted(counts)}")
    return found


class _Parts(NamedTuple):
    """What micro-batches begin together and what is updated for them together, in any program."""

    steps: list[range]
    """None but in a stream."""
    batches: dict[int, range]
    """By the number that its reductions, norms and updates carry."""

    @classmethod
    def of(cls, programs: Sequence[Program]) -> _Parts:
        everything = range(programs[0].micro_batches)
        if not any(map(is_stream, programs)):
            return cls([], {-1: everything})

        def parts(op: Op) -> list[range]:
            starts = {act.micro_batch for program in programs for act in program.actions if act.op is op}
            inside = sorted({0, *starts} & set(everything))
            return [range(*ends) for ends in pairwise([*inside, len(everything)])]

        return cls(parts(Op.BEGIN), {batch.start: batch for batch in parts(Op.UPDATE)})


def _faults_of_one(rank: int, program: Program, home: Sequence[int], train: bool, parts: _Parts) -> Iterator[str]:
    where = {named(act): at for at, act in enumerate(program.actions)}
    if len(where) < len(program.actions):
        yield "an action occurs twice"
    halved = {(act.stage, act.micro_batch) for act in program.actions if act.op is Op.INPUT_GRADIENT}
    order = [*_orders(rank, program, home, halved, train, parts), *_starts(rank, program, home, parts.steps)]
    wanted = {act for pair in order for act in pair}
    yield from (f"{act} is missing" for act in _sorted(wanted - where.keys()))
    yield from (f"{program.actions[where[act]]} does not belong here" for act in _sorted(where.keys() - wanted))
    for first, second in order:
        if where.get(first, -1) > where.get(second, len(where)):
            yield f"{program.actions[where[first]]} must come before {program.actions[where[second]]}"


def _orders(
    rank: int, program: Program, home: Sequence[int], halved: set[tuple[int, int]], train: bool, parts: _Parts
) -> Iterator[tuple[Act, Act]]:
    """Every action that a rank must have, in pairs of which the first must come before the second."""
    for number, batch in parts.batches.items():
        norm = Act(Op.NORM, micro_batch=number)
        for stage in program.stages:
            reduce = Act(Op.REDUCE, stage, number)
            for micro_batch in batch:
                forward = Act(Op.FORWARD, stage, micro_batch)
                before = norm if train and not parts.steps else None
                yield from _around(forward, rank, home, before)
                if not train:
                    continue
                backward = Act(Op.BACKWARD, stage, micro_batch)
                yield forward, backward
                yield from _around(backward, rank, home, before)
                if (stage, micro_batch) in halved:
                    weights = Act(Op.WEIGHT_GRADIENT, stage, micro_batch)
                    yield backward, weights
                    yield weights, reduce
                else:
                    yield backward, reduce
            if train:
                yield reduce, norm
        if train:
            yield norm, Act(Op.UPDATE, micro_batch=number)
    for op in (Op.NORM, Op.UPDATE):
        yield from pairwise(Act(op, micro_batch=number) for number in parts.batches)


def _starts(rank: int, program: Program, home: Sequence[int], steps: Sequence[range]) -> Iterator[tuple[Act, Act]]:
    """What comes before and after the beginning of each step of a stream, and of its drain."""
    begins = [Act(Op.BEGIN, micro_batch=step.start) for step in steps]
    for step, (begin, following) in zip(steps, pairwise([*begins, Act(Op.DRAIN)]), strict=True):
        yield begin, following
        for stage, micro_batch in product(program.stages, step):
            forward = Act(Op.FORWARD, stage, micro_batch)
            yield begin, forward
            yield forward, following
            if (source := giver(forward, len(home))) and (peer := home[source.stage]) != rank:
                yield begin, Act(Op.RECEIVE_ACTIVATION, stage, micro_batch, peer)


def _around(one: Act, rank: int, home: Sequence[int], before: Act | None) -> Iterator[tuple[Act, Act]]:
    """What a pass takes in comes before it, what becomes of its result after it, and all of it before ``before``."""
    yield one, one
    op, stage, micro_batch, _ = one
    if source := giver(one, len(home)):
        if (peer := home[source.stage]) == rank:
            yield source, one
        else:
            received = Act(RECEIVE[op], stage, micro_batch, peer)
            yield received, one
            if op is Op.BACKWARD:
                yield Act(Op.FORWARD, stage, micro_batch), received  # the gradient of an output has its shape
    if (target := taker(one, len(home))) and (peer := home[target.stage]) != rank:
        sent = Act(SEND[op], stage, micro_batch, peer)
        dropped = Act(DROP[sent.op], stage, micro_batch, peer)
        yield one, sent
        yield sent, dropped
        if before:
            yield dropped, before


def _disordered(programs: Sequence[Program]) -> Iterator[str]:
    """Where the two ends of a channel, from rank to rank for activations or for gradients, disagree about the order."""
    sent: dict[tuple[int, int, Op], list[Act]] = defaultdict(list)
    received: dict[tuple[int, int, Op], list[Act]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for act in program.actions:
            if act.op in _SENDS:
                received_as = answer(act, rank)
                sent[rank, act.peer, received_as.op].append(received_as)
            elif act.op in _RECEIVES:
                received[act.peer, rank, act.op].append(act)
    for (source, to, op), messages in sent.items():
        for ours, theirs in zip(messages, received[source, to, op], strict=True):
            if ours != theirs:
                yield f"rank {to}: {theirs} comes where rank {source} sends for {ours}"
                break


def _torn(programs: Sequence[Program]) -> Iterator[str]:
    """Micro-batches that meet weights of different versions on different ranks, where that is not how it is meant."""
    if not any(program.ages for program in programs):
        return
    entered = versions_used(programs[0])
    for rank, program in enumerate(programs):
        for micro_batch, (version, its) in enumerate(zip(versions_used(program), entered, strict=True)):
            if version != its or version < 0:
                yield f"rank {rank}: micro-batch {micro_batch} uses version {version} of the weights, on rank 0 {its}"
                break


def _deadlocked(programs: Sequence[Program]) -> Iterator[str]:
    """A circle of waits, where letting every rank go on as far as it can leaves some before their ends."""
    ranks, awaited = programs, awaited_by_whole(placement(programs))
    if any(map(is_stream, programs)):
        programs, awaited = with_collectives(programs, awaited)
    gone = Counter(rank for rank, _ in in_turn(programs, awaited))
    stuck: dict[int, tuple[Act, int, Act]] = {}
    """By rank: what it would do next, and another rank and what that would have to do before."""
    for rank, program in enumerate(programs):
        for act in program.actions[gone[rank] :][:1]:
            if one := awaited(act, rank):
                stuck[rank] = act, *one
    together = stuck.pop(len(ranks), None)
    for rank, (act, other, _) in stuck.items():
        if other == len(ranks) and together:
            stuck[rank] = act, *together[1:]
    if not stuck:
        return
    circle, rank = list[int](), min(stuck)
    while rank not in circle:
        circle.append(rank)
        _, rank, _ = stuck[rank]
    waits = [(rank, *stuck[rank]) for rank in circle[circle.index(rank) :]]
    yield "deadlock: " + ", ".join(f"rank {one}'s {act} waits for rank {two}'s {its}" for one, act, two, its in waits)


def _sorted(acts: Iterable[Act]) -> list[Act]:
    return sorted(acts, key=lambda act: (act.op.value, *act[1:]))
