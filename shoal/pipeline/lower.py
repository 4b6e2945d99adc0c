"""From passes to whole programs: what is sent and received between them, and how a training step ends.

A result leaves right after the pass that made it. Its place on the other side is opened one action before the pass that
needs it: early enough to arrive while that action runs, and late enough that one tensor more is in memory, not one a
micro-batch. What was sent is dropped as soon as its receiver's next result proves that it was received, and else before
the step's end: an error in the norm or the update leaves nothing on its way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from shoal.pipeline.program import DROP, RECEIVE, SEND, Act, Op, Program, Programs, giver, placement, taker


def lower(passes: Sequence[Program]) -> Programs:
    """The programs of all ranks, from the passes of all ranks.

    A stage is reduced after its last backward pass; the step ends with the norm and the update. Where there is no
    backward pass there are none of these.
    """
    home = placement(passes)
    places = [{act: at for at, act in enumerate(program.actions)} for program in passes]
    return tuple(_lower(rank, program, home, places) for rank, program in enumerate(passes))


@dataclass
class _Heard:
    """What arrives from one peer: at which of our passes, and by then the latest of the peer's passes that we know of,
    both ascending."""

    at: list[int] = field(default_factory=list)
    latest: list[int] = field(default_factory=list)


def _lower(rank: int, program: Program, home: Sequence[int], places: Sequence[dict[Act, int]]) -> Program:
    order, stages = program.actions, len(home)
    before: list[list[Act]] = [[] for _ in order]
    after: list[list[Act]] = [[] for _ in order]
    unproven: list[Act] = []
    end = (Act(Op.NORM), Act(Op.UPDATE)) if any(act.op is Op.BACKWARD for act in order) else ()
    heard: dict[int, _Heard] = defaultdict(_Heard)
    for at, act in enumerate(order):
        if (source := giver(act, stages)) and (peer := home[source.stage]) != rank:
            # The gradient of an output has its shape, which is not known before there is one.
            shaped = places[rank][act._replace(op=Op.FORWARD)] + 1 if act.op is Op.BACKWARD else 0
            before[max(at - 1, shaped)].append(act._replace(op=RECEIVE[act.op], peer=peer))
            known = heard[peer]
            known.at.append(at)
            known.latest.append(max([*known.latest[-1:], places[peer][source]]))
    for at, act in enumerate(order):
        if (target := taker(act, stages)) and (peer := home[target.stage]) != rank:
            sent = act._replace(op=SEND[act.op], peer=peer)
            after[at].append(sent)
            proof = bisect_left(heard[peer].latest, places[peer][target])
            proven = proof < len(heard[peer].at)
            (before[heard[peer].at[proof]] if proven else unproven).append(sent._replace(op=DROP[sent.op]))
        if act.op is Op.BACKWARD and act.micro_batch == program.final_backward(act.stage):
            after[at].append(Act(Op.REDUCE, act.stage))
    stream = chain.from_iterable((*before[at], act, *after[at]) for at, act in enumerate(order))
    return Program(program.stages, program.micro_batches, (*stream, *unproven, *end))
