"""From passes to whole programs: what is sent and received between them, and how a training step ends.

A result leaves right after the pass that made it. Its place on the other side is opened one action before the pass that
needs it: early enough to arrive while that action runs, and late enough that one tensor more is in memory, not one a
micro-batch. Where one rank sends another several, for stages of which it takes the later sent first, the place of what
was sent before is opened with it. What was sent is dropped as soon as its receiver's next result proves that it was
received, and else before the step's end: an error in the norm or the update leaves nothing on its way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from operator import itemgetter
from typing import NamedTuple

from shoal.pipeline.program import (
    DROP,
    PASSES,
    RECEIVE,
    SEND,
    STARTS,
    Act,
    Op,
    Program,
    Programs,
    is_stream,
    named,
    placement,
    taker,
)


def lower(passes: Sequence[Program]) -> Programs:
    """The programs of all ranks, from the passes of all ranks.

    A stage is reduced after the pass that completes its gradients; the step ends with the norm and the update. Where
    there is no backward pass there are none of these. A stream (:mod:`shoal.pipeline.stream`) has its own, and nothing
    of a step, or of the drain, comes before it begins.
    """
    passes = [_ended(program) for program in passes]
    places = [{named(act): at for at, act in enumerate(program.actions)} for program in passes]
    around = [_Around(program) for program in passes]
    channels: dict[tuple[int, int, Op], list[_Message]] = defaultdict(list)
    ways: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for message in _messages(passes, places):
        channels[message.source, message.to, message.sent.op].append(message)
        ways[message.source, message.to].append(message)
    for channel in channels.values():
        around[channel[0].to].open(channel, places[channel[0].to])
    for (source, to), messages in ways.items():
        around[source].drop(messages, ways.get((to, source), ()))
    return tuple(one.program() for one in around)


def _ended(passes: Program) -> Program:
    completing = set(passes.completing.values())
    if not completing or is_stream(passes):
        return passes
    actions = chain.from_iterable(
        (act, Act(Op.REDUCE, act.stage)) if act in completing else (act,) for act in passes.actions
    )
    return replace(passes, actions=(*actions, Act(Op.NORM), Act(Op.UPDATE)))


class _Message(NamedTuple):
    """A result that goes from rank to rank, and where in their orders the pass stands that makes it and the pass that
    takes it in."""

    sent: Act
    source: int
    made: int
    received: Act
    to: int
    taken: int


def _messages(passes: Sequence[Program], places: Sequence[dict[Act, int]]) -> Iterator[_Message]:
    """Those of each rank in the order in which it makes them."""
    home = placement(passes)
    for rank, program in enumerate(passes):
        for at, act in enumerate(program.actions):
            if (target := taker(act, len(home))) and (peer := home[target.stage]) != rank:
                sent = Act(SEND[act.op], act.stage, act.micro_batch, peer)
                received = Act(RECEIVE[act.op], target.stage, act.micro_batch, rank)
                yield _Message(sent, rank, at, received, peer, places[peer][target])


class _Around:
    """What comes before and after each pass of one rank."""

    def __init__(self, passes: Program) -> None:
        self._passes = passes
        self._opened: list[list[tuple[int, Act]]] = [[] for _ in passes.actions]
        self._dropped: list[list[Act]] = [[] for _ in passes.actions]
        self._sent: list[list[Act]] = [[] for _ in passes.actions]
        self._unproven: list[tuple[int, Act]] = []
        self._ahead: list[int] = []
        """By place: that of the pass before, or where the part of the stream begins."""
        before = 0
        for at, act in enumerate(passes.actions):
            self._ahead.append(before)
            if act.op in PASSES:
                before = at
            elif act.op in STARTS:
                before = at + 1

    def open(self, channel: Sequence[_Message], places: dict[Act, int]) -> None:
        """Make room for what one rank sends this one, in the order in which it is sent."""
        needed = list(accumulate((message.taken for message in reversed(channel)), min))[::-1]
        place = 0
        for message, first in zip(channel, needed, strict=True):
            wanted = self._ahead[first]
            if message.received.op is Op.RECEIVE_GRADIENT:
                # The gradient of an output has its shape, which is not known before there is one.
                forward = Act(Op.FORWARD, message.received.stage, message.received.micro_batch)
                wanted = max(wanted, places[forward] + 1)
            place = max(place, wanted)
            self._opened[place].append((first, message.received))

    def drop(self, messages: Iterable[_Message], answers: Iterable[_Message]) -> None:
        """Send ``messages`` to a rank, and let go of them. Its ``answers`` are taken in one by one, and with each it is
        known that its maker has come so far."""
        heard = sorted(answers, key=lambda answer: answer.taken)
        latest = list(accumulate((answer.made for answer in heard), max))
        for message in messages:
            self._sent[message.made].append(message.sent)
            dropped = Act(DROP[message.sent.op], *message.sent[1:])
            proof = bisect_left(latest, message.taken)
            if proof < len(heard):
                self._dropped[heard[proof].taken].append(dropped)
            else:
                self._unproven.append((message.made, dropped))

    def program(self) -> Program:
        actions = self._passes.actions
        ends = (at + (act.op is Op.DRAIN) for at, act in enumerate(actions) if act.op in (Op.NORM, Op.DRAIN))
        end = max(ends, default=len(actions))
        stream = [
            (
                *(act for _, act in sorted(self._opened[at], key=itemgetter(0))),
                *self._dropped[at],
                act,
                *self._sent[at],
            )
            for at, act in enumerate(actions)
        ]
        unproven = [act for _, act in sorted(self._unproven, key=itemgetter(0))]
        return replace(self._passes, actions=(*chain(*stream[:end]), *unproven, *chain(*stream[end:])))
