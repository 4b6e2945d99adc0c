"""The Program: for one rank, the stream of actions of one step, in order.

A schedule is a pure function that writes the passes of all ranks' programs; :mod:`shoal.pipeline.lower` adds what moves
between them; the executor runs one rank's; whoever wants to see, check or price a run reads the same objects. Actions
are keyed by global stage and micro-batch. The ranks are those of one pipeline, counted from 0: a program's place among
all of them is its rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Op(Enum):
    """What an action does.

    What is sent belongs to the stage that made it: its output (the activation) or the gradient of its input. What is
    received belongs to the stage that needs it: its input or the gradient of its output.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"  # a backward pass without the weights' gradients, which
    WEIGHT_GRADIENT = "W"  # adds to them later
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"  # from here on it may arrive; the forward pass waits for it
    DROP_ACTIVATION = "DA"  # what was sent has been received: its memory may go
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"
    DROP_GRADIENT = "DG"
    REDUCE = "R"
    NORM = "N"
    UPDATE = "U"
    BEGIN = "T"  # of a stream: a step of it begins, of which nothing is known before
    DRAIN = "D"  # of a stream: no step is to follow, and what is under way goes to its end

    # Members are unique, so their identity will do; hashing their names takes most of the time of checking a program.
    __hash__ = object.__hash__


PASSES = {Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT}
"""What schedules are made of."""
SEND = {Op.FORWARD: Op.SEND_ACTIVATION, Op.BACKWARD: Op.SEND_GRADIENT, Op.INPUT_GRADIENT: Op.SEND_GRADIENT}
"""How the result of a pass goes to another rank; a weight-gradient pass has none."""
RECEIVE = {Op.FORWARD: Op.RECEIVE_ACTIVATION, Op.BACKWARD: Op.RECEIVE_GRADIENT, Op.INPUT_GRADIENT: Op.RECEIVE_GRADIENT}
"""How what a pass takes in comes from another rank."""
DROP = {Op.SEND_ACTIVATION: Op.DROP_ACTIVATION, Op.SEND_GRADIENT: Op.DROP_GRADIENT}
"""How what was sent is let go."""
STARTS = {Op.BEGIN, Op.DRAIN}
"""What the parts of a stream start with."""

_WORDS = {
    Op.FORWARD: "the forward pass",
    Op.BACKWARD: "the backward pass",
    Op.INPUT_GRADIENT: "the input-gradient pass",
    Op.WEIGHT_GRADIENT: "the weight-gradient pass",
    Op.SEND_ACTIVATION: "sending the output",
    Op.RECEIVE_ACTIVATION: "receiving the input",
    Op.DROP_ACTIVATION: "waiting for the receipt of the output",
    Op.SEND_GRADIENT: "sending the gradient of the input",
    Op.RECEIVE_GRADIENT: "receiving the gradient of the output",
    Op.DROP_GRADIENT: "waiting for the receipt of the gradient of the input",
    Op.REDUCE: "the reduction",
    Op.NORM: "the norm",
    Op.UPDATE: "the update",
    Op.BEGIN: "the beginning of the step",
    Op.DRAIN: "the drain",
}
_OF_A_BATCH = {Op.REDUCE, Op.NORM, Op.UPDATE, Op.DRAIN}


class Act(NamedTuple):
    """One action. ``stage`` is global; ``micro_batch`` is −1 where the action concerns all of them, and so is ``stage``
    where it concerns the whole step. ``peer`` is the rank at the other end of a send, receive or drop.

    In a stream, what begins, is reduced or updated carries the first of its micro-batches; and where they are counted
    from the beginning of a step, those of earlier steps are negative (:mod:`shoal.pipeline.stream`).
    """

    op: Op
    stage: int = -1
    micro_batch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        stage = "" if self.stage < 0 else f"{self.stage}"
        arrow = "<" if self.op in RECEIVE.values() else ">"
        peer = "" if self.peer < 0 else f"{arrow}{self.peer}"
        return f"{self.op.value}{stage}" + (f".{self.micro_batch}" if self._has_number else "") + peer

    def in_words(self) -> str:
        """The action for an error message: ``the backward pass of stage 1, micro-batch 3``."""
        stage = "" if self.stage < 0 else f" of stage {self.stage}"
        return _WORDS[self.op] + stage + (f", micro-batch {self.micro_batch}" if self._has_number else "")

    @property
    def _has_number(self) -> bool:
        """Whether −1 is a micro-batch, of an earlier step of a stream."""
        return self.micro_batch != -1 or self.op not in _OF_A_BATCH


@dataclass(frozen=True)
class Program:
    """The actions of one step of one rank, which holds ``stages`` and works on ``micro_batches``; or those of a whole
    stream of steps, on all of its micro-batches."""

    stages: tuple[int, ...]
    micro_batches: int
    actions: tuple[Act, ...]
    ages: tuple[int, ...] = ()
    """By micro-batch: how many updates older than its rank's newest weights those are that its passes use. Where there
    are none, they use the newest of their forward pass."""

    def __str__(self) -> str:
        return " ".join(map(str, self.actions))

    @cached_property
    def completing(self) -> dict[int, Act]:
        """By stage: the pass after which its gradients are complete, its last backward or weight-gradient pass."""
        return {act.stage: act for act in self.actions if act.op in (Op.BACKWARD, Op.WEIGHT_GRADIENT)}

    @cached_property
    def last_contributions(self) -> frozenset[Act]:
        """The passes after which the gradients of their stage are complete, and reduced."""
        found, last = set(), {}
        for act in self.actions:
            if act.op in (Op.BACKWARD, Op.WEIGHT_GRADIENT):
                last[act.stage] = act
            elif act.op is Op.REDUCE:
                found.add(last[act.stage])
        return frozenset(found)


Programs = tuple[Program, ...]
"""One program a rank, in order of rank."""


def is_stream(program: Program) -> bool:
    """Whether the program is that of several steps that begin one after another (:mod:`shoal.pipeline.stream`)."""
    return any(act.op is Op.BEGIN for act in program.actions)


def placement(programs: Sequence[Program]) -> tuple[int, ...]:
    """The rank that holds each stage."""
    rank_of = {stage: rank for rank, program in enumerate(programs) for stage in program.stages}
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def named(act: Act) -> Act:
    """The action by the name that other stages know it by: a backward pass, be it whole or for the input alone. Of a
    stage and a micro-batch there is one or the other, and the same goes in and comes out."""
    return Act(Op.BACKWARD, *act[1:]) if act.op is Op.INPUT_GRADIENT else act


def giver(act: Act, stages: int) -> Act | None:
    """The :func:`named` pass, on the stage before or after, whose result a pass takes in; None at either end of the
    ``stages``, and for what takes in nothing."""
    if act.op is Op.FORWARD and act.stage > 0:
        return Act(Op.FORWARD, act.stage - 1, act.micro_batch)
    if act.op in (Op.BACKWARD, Op.INPUT_GRADIENT) and act.stage < stages - 1:
        return Act(Op.BACKWARD, act.stage + 1, act.micro_batch)
    return None


def taker(act: Act, stages: int) -> Act | None:
    """The :func:`named` pass, on the stage after or before, that takes in the result of a pass."""
    if act.op is Op.FORWARD and act.stage < stages - 1:
        return Act(Op.FORWARD, act.stage + 1, act.micro_batch)
    if act.op in (Op.BACKWARD, Op.INPUT_GRADIENT) and act.stage > 0:
        return Act(Op.BACKWARD, act.stage - 1, act.micro_batch)
    return None
