"""The Program: for one rank, the stream of actions that trains, in order.

A schedule is a pure function that writes one; the executor runs it, and whoever wants to see or price a run reads the
same object. Actions are keyed by global stage and micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Op(Enum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    REDUCE = "R"
    NORM = "N"
    UPDATE = "U"


class Act(NamedTuple):
    """One action. ``stage`` is global; ``micro_batch`` is −1 where the action concerns a whole step."""

    op: Op
    stage: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        stage = "" if self.stage < 0 else f"{self.stage}"
        return f"{self.op.value}{stage}" + ("" if self.micro_batch < 0 else f".{self.micro_batch}")


@dataclass(frozen=True)
class Program:
    """The actions of one step of one rank, which holds ``stages`` and works on ``micro_batches``."""

    stages: tuple[int, ...]
    micro_batches: int
    actions: tuple[Act, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.actions))

    def final_backward(self, stage: int) -> int:
        """The micro-batch whose backward pass is the last of ``stage``: after it, its gradients are complete."""
        return [act.micro_batch for act in self.actions if act[:2] == (Op.BACKWARD, stage)][-1]


def faults(program: Program, *, train: bool = True) -> list[str]:
    """What makes a program invalid; empty for a valid one.

    Each stage runs every micro-batch forward once. When it trains, each then runs backward once, after its forward;
    a stage is reduced once, after its last backward; the norm follows all reductions, and the update the norm.
    """
    found = []
    where = {act: place for place, act in enumerate(program.actions)}
    if len(where) < len(program.actions):
        found.append("an action occurs twice")
    wanted = {Act(Op.FORWARD, s, b) for s in program.stages for b in range(program.micro_batches)}
    order: list[tuple[Act, Act]] = []
    if train:
        for forward in list(wanted):
            backward = forward._replace(op=Op.BACKWARD)
            wanted.add(backward)
            order += [(forward, backward), (backward, Act(Op.REDUCE, forward.stage))]
        wanted |= {Act(Op.REDUCE, s) for s in program.stages} | {Act(Op.NORM), Act(Op.UPDATE)}
        order += [(Act(Op.REDUCE, s), Act(Op.NORM)) for s in program.stages]
        order.append((Act(Op.NORM), Act(Op.UPDATE)))
    found += [f"{act} is missing" for act in _sorted(wanted - where.keys())]
    found += [f"{act} does not belong here" for act in _sorted(where.keys() - wanted)]
    found += [
        f"{before} must come before {after}"
        for before, after in order
        if before in where and after in where and where[before] > where[after]
    ]
    return found


def _sorted(acts: Iterable[Act]) -> list[Act]:
    return sorted(acts, key=lambda act: (act.op.value, act.stage, act.micro_batch))
