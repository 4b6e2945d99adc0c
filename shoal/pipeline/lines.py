"""What the messages between the ranks of a pipeline go over: one communicator a direction.

NCCL moves all messages between two ranks over one communicator in one order. A rank starts to receive a gradient before
it sends the activations that come first at the other end, so over a shared one both would wait for ever. Activations
(with their headers) and gradients have a line each; no collective goes over either.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shoal.comm.point_to_point import connect
from shoal.comm.world import Group
from shoal.pipeline.program import RECEIVE, SEND, Op, Program

_OF_GRADIENTS = {Op.SEND_GRADIENT, Op.RECEIVE_GRADIENT}


@dataclass(frozen=True)
class Lines:
    """Two groups over the ranks of one pipeline, in the order in which its programs count them.

    Where each rank holds one stage, what goes over a line between two ranks goes one way. Ranks that hold several may
    send each other activations; without tags, each way would need a line of its own.
    """

    activations: Group
    gradients: Group
    _open: set[tuple[bool, int, int]] = field(default_factory=set, init=False, repr=False, compare=False)

    def of(self, op: Op) -> Group:
        """The line of what is sent or received."""
        return self.gradients if op in _OF_GRADIENTS else self.activations

    def connect(self, program: Program, device: torch.device) -> None:
        """Open the ways that the messages of a program take and none has taken before. All ranks do so in one order,
        and none waits for another that waits for it."""
        here, ways = self.activations.index, set()
        for act in program.actions:
            gradient = act.op in _OF_GRADIENTS
            if act.op in SEND.values():
                ways.add((gradient, here, act.peer))
            elif act.op in RECEIVE.values():
                ways.add((gradient, act.peer, here))
        for gradient, source, to in sorted(ways - self._open):
            connect(self.gradients if gradient else self.activations, source, to, device)
        self._open.update(ways)
