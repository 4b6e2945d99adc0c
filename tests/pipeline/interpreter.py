"""What programs mean, said once more and as simply as can be: ranks that pass tokens. No part of it is shared with what
is tested.

A token says what it was made of, so a wrong one is noticed. Between two ranks there are two queues a direction, one of
activations and one of gradients, of what was sent and of what there is room for; neither end of a message has a name.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence

from shoal.pipeline.program import Act, Op, Program


class Wrong(Exception):
    """A program does what makes no sense, or does not do all that is to be done."""


class Machine:
    """All ranks at once. ``early`` says whether there is room for an activation as soon as it is asked for, or only
    when a pass cannot go on without (its form may be unknown)."""

    def __init__(self, programs: Sequence[Program], early: bool) -> None:
        self.programs, self.early = programs, early
        self.home = {stage: rank for rank, program in enumerate(programs) for stage in program.stages}
        self.reached = [0] * len(programs)
        self.sent: dict[tuple[int, int, str], deque[tuple[str, int, int]]] = defaultdict(deque)
        self.rooms: dict[tuple[int, int, str], deque[tuple[int, int]]] = defaultdict(deque)
        self.arrived: set[tuple[str, int, int]] = set()
        """Inputs ("x") and gradients of outputs ("g") of (stage, micro-batch), on the rank of the stage."""
        self.made: set[tuple[str, int, int]] = set()
        """What passes have made and nothing has taken: outputs ("y") and gradients of inputs ("dx")."""
        self.received: set[tuple[str, int, int]] = set()
        """What was sent and has arrived: the same, by the stage that made it."""
        self.graphs: set[tuple[int, int]] = set()
        self.halves: set[tuple[int, int]] = set()
        self.added: dict[int, set[int]] = defaultdict(set)
        self.reduced: set[int] = set()
        self.ended: dict[int, str] = defaultdict(str)
        self.undropped: dict[int, set[tuple[str, int, int]]] = defaultdict(set)

    def run(self, order: random.Random) -> None:
        """To the end. Raises :class:`Wrong`."""
        ranks = list(range(len(self.programs)))
        moved = True
        while moved:
            moved = False
            order.shuffle(ranks)
            for rank in ranks:
                actions = self.programs[rank].actions
                while self.reached[rank] < len(actions) and self.step(rank, actions[self.reached[rank]]):
                    self.reached[rank] += 1
                    moved = True
        self.want(all(at == len(one.actions) for at, one in zip(self.reached, self.programs, strict=True)), "stuck")
        everything = set(range(self.programs[0].micro_batches))
        self.want(all(self.added[stage] == everything for stage in self.home), "some gradients were not made")
        self.want(self.reduced == set(self.home), "not all stages were reduced")
        self.want(all(self.ended[rank] == "NU" for rank in ranks), "some rank did not end the step")
        left = (*self.sent.values(), *self.rooms.values(), *self.undropped.values())
        self.want(not any(left) and not (self.graphs | self.halves | self.arrived | self.made), "something is left")

    @staticmethod
    def want(true: bool, otherwise: str) -> None:
        if not true:
            raise Wrong(otherwise)

    def step(self, rank: int, act: Act) -> bool:
        """Whether the action could be done now."""
        op, stage, number, peer = act
        last = len(self.home) - 1
        if stage >= 0:
            self.want(self.home.get(stage) == rank, f"{act} of a stage that is elsewhere")
        match op:
            case Op.FORWARD:
                self.want(0 <= number < self.programs[rank].micro_batches, f"{act} of no micro-batch")
                self.want((stage, number) not in self.graphs and number not in self.added[stage], f"{act} again")
                if stage and not self.take("x", ("y", stage - 1, number), rank, stage, number):
                    return False
                self.graphs.add((stage, number))
                if stage < last:
                    self.made.add(("y", stage, number))
            case Op.BACKWARD | Op.INPUT_GRADIENT:
                self.want((stage, number) in self.graphs, f"{act} without its forward pass")
                if stage < last and not self.take("g", ("dx", stage + 1, number), rank, stage, number):
                    return False
                self.graphs.remove((stage, number))
                if op is Op.BACKWARD:
                    self.add(stage, number)
                else:
                    self.halves.add((stage, number))
                if stage:
                    self.made.add(("dx", stage, number))
            case Op.WEIGHT_GRADIENT:
                self.want((stage, number) in self.halves, f"{act} without its other half")
                self.halves.remove((stage, number))
                self.add(stage, number)
            case Op.SEND_ACTIVATION | Op.SEND_GRADIENT:
                token = ("y" if op is Op.SEND_ACTIVATION else "dx", stage, number)
                self.want(token in self.made, f"{act} of nothing")
                self.made.remove(token)
                self.undropped[rank].add(token)
                self.sent[rank, peer, token[0]].append(token)
            case Op.RECEIVE_ACTIVATION:
                self.rooms[peer, rank, "y"].append((stage, number))
            case Op.RECEIVE_GRADIENT:
                self.want((stage, number) in self.graphs, f"{act} of unknown form")
                self.rooms[peer, rank, "dx"].append((stage, number))
            case Op.DROP_ACTIVATION | Op.DROP_GRADIENT:
                token = ("y" if op is Op.DROP_ACTIVATION else "dx", stage, number)
                self.want(token in self.undropped[rank], f"{act} of nothing")
                if op is Op.DROP_GRADIENT or self.early:
                    self.move(rank, peer, token[0])
                if token not in self.received:
                    return False
                self.undropped[rank].remove(token)
            case Op.REDUCE:
                complete = self.added[stage] == set(range(self.programs[rank].micro_batches))
                self.want(complete and stage not in self.reduced, f"{act} too early or again")
                self.reduced.add(stage)
            case Op.NORM:
                done = all(one in self.reduced for one in self.programs[rank].stages) and not self.undropped[rank]
                self.want(done and not self.ended[rank] and act == Act(Op.NORM), f"{act} too early or again")
                self.ended[rank] = "N"
            case Op.UPDATE:
                self.want(self.ended[rank] == "N" and act == Act(Op.UPDATE), f"{act} too early or again")
                self.ended[rank] = "NU"
        return True

    def add(self, stage: int, number: int) -> None:
        self.want(number not in self.added[stage] and stage not in self.reduced, "a gradient too much")
        self.added[stage].add(number)

    def move(self, source: int, to: int, kind: str) -> None:
        """Whatever has been sent goes to whatever there is room for, in the order of each."""
        sent, rooms = self.sent[source, to, kind], self.rooms[source, to, kind]
        while sent and rooms:
            token, (stage, number) = sent.popleft(), rooms.popleft()
            expected = ("y", stage - 1, number) if kind == "y" else ("dx", stage + 1, number)
            self.want(token == expected, f"{token} comes where {expected} is expected")
            self.received.add(token)
            self.arrived.add(("x" if kind == "y" else "g", stage, number))

    def take(self, kind: str, token: tuple[str, int, int], rank: int, stage: int, number: int) -> bool:
        """What a pass takes in, from the same rank or another."""
        source = self.home[token[1]]
        if source == rank:
            self.want(token in self.made, f"{token} was not made when it was needed")
            self.made.remove(token)
            return True
        self.move(source, rank, token[0])
        if (kind, stage, number) in self.arrived:
            self.arrived.remove((kind, stage, number))
            return True
        self.want((stage, number) in self.rooms[source, rank, token[0]], f"there is no room for {token}")
        return False
