"""What the messages between the ranks of a pipeline go over: one communicator for each kind and direction.

NCCL moves all messages between two ranks over one communicator in one order. A rank starts to receive a gradient before
it sends the activations that come first at the other end, so over a shared one both would wait for ever. Activations
(with their headers) and gradients have lines of their own; and since ranks that hold several stages send each other
either, so has each direction, up the ranks and down. No collective goes over any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from shoal.comm.point_to_point import connect
from shoal.comm.world import Group
from shoal.pipeline.program import RECEIVE, SEND, Act, Op, Program

_SENDS = set(SEND.values())
_OF_GRADIENTS = {Op.SEND_GRADIENT, Op.RECEIVE_GRADIENT}


@dataclass(frozen=True)
class Lines:
    """Groups over the ranks of one pipeline, in the order in which its programs count them: for activations and for
    gradients, from a rank to one above it and to one below it.

    ``ranks`` is any of them, where only who is who is asked.
    """

    ranks: Group
    activations: tuple[Group, Group]
    gradients: tuple[Group, Group]
    _open: set[tuple[bool, int, int]] = field(default_factory=set, init=False, repr=False, compare=False)

    @classmethod
    def over(cls, group: Callable[[str], Group]) -> Lines:
        """``group(channel)`` makes the group of the pipeline's ranks for a channel."""
        up, down = (tuple(group(f"{kind} {way}") for kind in ("activations", "gradients")) for way in ("up", "down"))
        return cls(group(""), (up[0], down[0]), (up[1], down[1]))

    def between(self, gradient: bool, source: int, to: int) -> Group:
        """The line from one rank to another."""
        return (self.gradients if gradient else self.activations)[source > to]

    def of(self, act: Act) -> Group:
        """The line of what is sent or received."""
        down = (act.peer < self._here) is (act.op in _SENDS)
        return (self.gradients if act.op in _OF_GRADIENTS else self.activations)[down]

    @cached_property
    def _here(self) -> int:
        return self.ranks.index

    def connect(self, program: Program, device: torch.device) -> None:
        """Open the ways that the messages of a program take and none has taken before. All ranks do so in one order,
        and none waits for another that waits for it."""
        here, ways = self.ranks.index, set()
        for act in program.actions:
            gradient = act.op in _OF_GRADIENTS
            if act.op in _SENDS:
                ways.add((gradient, here, act.peer))
            elif act.op in RECEIVE.values():
                ways.add((gradient, act.peer, here))
        for gradient, source, to in sorted(ways - self._open):
            connect(self.between(gradient, source, to), source, to, device)
        self._open.update(ways)
