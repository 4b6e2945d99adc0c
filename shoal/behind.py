"""Training steps with parameter servers that may be behind (stale synchronous parallel, Ho et al. 2013).

With a bound S, a rank begins step t with the weights that all gradients of the steps before t − S have been applied
to, and no others: W^(max(0, t−S)), counted from 0 where the stream began. The servers apply the gradients of whole
steps, one after another:

    W^(t+1) = W^(t) − u(∇f(W^(max(0, t−S)); x_t))

So what is computed does not depend on which rank is quick, and with S = 0 it is what an all-reduce computes. A push has
S steps of time: a rank that is slow for once holds up only those that are S steps ahead of it. A server updates between
steps of its own, as it works too, so it may be ahead of the others, and they are never ahead of it.

Nothing is asked in a step that all ranks would have to answer. A rank divides its gradients by its own part of the
denominator, and multiplies them by that as they leave; the servers divide the sums by the whole. They alone agree on
the norm, which is that of the whole step, and clip by it; what they know of a step they tell with its parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import Pending, all_reduce
from shoal.comm.star import start_pull, start_push
from shoal.config import Optimizer
from shoal.data_parallel.server import Server
from shoal.feed import loss_scale
from shoal.layout import Layout
from shoal.mesh import Mesh
from shoal.model.context import Batch
from shoal.optim.clip import clip_factor
from shoal.optim.guard import Guard
from shoal.optim.optimizers import Updater
from shoal.result import StepResult

Run = Callable[[Sequence[Batch], Callable[[Batch], Any], Callable[[int], Tensor]], Tensor]
"""Takes micro-batches through the passes of a step, each loss times its scale; returns the summed loss."""


@dataclass
class _Step:
    """A step whose gradients have not been applied. ``weight`` is what this rank has of the denominator, ``scale`` that
    of the loss under fp16, ``version`` how many steps had been applied to the weights that it began with."""

    number: int
    weight: Tensor
    scale: float
    version: int
    told: Tensor = field(default_factory=lambda: torch.empty(0))
    """The loss and the weight of this rank; on a server, once they have come, those of all replicas."""
    coming: list[Pending] = field(default_factory=list)


class Behind:
    """The steps of one rank. ``run`` performs the passes of one, ``server`` takes in its gradients; ``rate(step)``
    scales the learning rate. Ranks that differ on ``loss_axes`` know parts of the loss."""

    def __init__(
        self,
        run: Run,
        server: Server,
        updater: Updater,
        guard: Guard,
        optimizer: Optimizer,
        rate: Callable[[int], float],
        layout: Layout,
        mesh: Mesh,
        loss_axes: Sequence[str],
    ) -> None:
        self._run, self._server, self._updater, self._guard = run, server, updater, guard
        self._optimizer, self._rate = optimizer, rate
        self._stale, self._mean = layout.stale, layout.reduce == "mean"
        assert layout.servers is not None
        places = {rank: mesh.grid.coords(rank) for rank in range(mesh.grid.size)}
        serving = tuple(rank for rank, place in places.items() if place["dp"] < layout.servers)
        replicas, positions = mesh.ranks_over("dp", "cp"), mesh.ranks_over("cp")
        self._serves = mesh.world.rank in serving
        know = mesh.ranks_over("pp", *loss_axes)
        mesh.open_groups({replicas, positions, know, *([serving] if self._serves else [])})
        self._replicas, self._know, self._positions = (mesh.group(those) for those in (replicas, know, positions))
        self._servers = mesh.group(serving) if self._serves else None
        self._roots = [place for place, rank in enumerate(replicas) if rank in serving]
        self._open: deque[_Step] = deque()
        self._applied = 0
        """Steps since the stream began."""
        self._finished: list[StepResult] = []

    @property
    def under_way(self) -> bool:
        """Whether steps have begun that have not been applied."""
        return len(self._open) > 0

    def finished(self) -> list[StepResult]:
        """The results of the steps that have been applied since this was last asked, in order."""
        found, self._finished = self._finished, []
        return found

    def step(self, number: int, batches: Sequence[Batch], weights: Tensor, contexts: Callable[[Batch], Any]) -> None:
        """Make the gradients of step ``number`` (counted from 0) on ``batches``, whose ``weights`` (float64) are what
        this replica has of their losses' denominators; and apply those of the step that no rank may be behind now."""
        own = weights.sum()
        weight = own.clone()
        # Gradients cross over between ranks that divide positions: all that they send each other has one scale.
        all_reduce(weight, self._positions, "weight")
        step = _Step(number, weight, self._guard.scale, self._applied)
        self._open.append(step)
        self._server.begin()
        self._server.factor = weight if self._mean else None
        scale = loss_scale(weight, step.scale)
        loss = self._run(batches, contexts, lambda _: scale)
        told = torch.stack([loss, own])
        copies = {place: told.clone() for place in self._roots}
        step.told = copies.get(self._replicas.index, told)
        step.coming = [start_push(copy, self._replicas, "loss", place) for place, copy in copies.items()]
        if len(self._open) > self._stale:
            self._apply()

    def drain(self) -> None:
        """Apply everything under way. The stream begins anew."""
        while self._open:
            self._apply()
        self._server.settle()
        self._applied = 0

    # ---- what a step's actions mean

    def reduce(self, units: Iterable[int], first: int) -> None:
        """The gradients of ``units`` are complete on this rank."""
        self._server.reduce(units)

    def norm(self, first: int) -> None:
        """Those of an earlier step are asked for once the passes have ended."""

    def update(self, first: int) -> None:
        """As for the norm."""

    # ---- the oldest step

    def _apply(self) -> None:
        """Apply the gradients of the oldest step, on the servers, and hand out what has become of the weights."""
        step = self._open.popleft()
        self._server.finish()
        squares, loss, weight = self._agree(step)
        counted = (weight or 1.0) if self._mean else 1.0
        norm = sqrt(squares) / step.scale / counted
        passes = self._guard.passes(norm, step.scale)
        end = self._guard.end(step.number + 1, norm, self._optimizer.lr)
        lr = 0.0
        if passes:
            factor = clip_factor(norm, self._optimizer.clip) / step.scale / counted
            lr = self._updater.update(self._rate(step.number), factor)
        self._server.updated(skipped=not passes, ahead=True)
        if end is not None:
            raise end
        mean = loss / weight if weight else 0.0
        age = self._applied - step.version
        self._applied += 1
        self._finished.append(StepResult(step.number + 1, mean, norm, lr, weight, not passes, age=age))

    def _agree(self, step: _Step) -> tuple[float, float, float]:
        """The square of the norm of what has been pushed in a step, its summed loss, and its denominator: from a server
        to all that push to it."""
        for pending in step.coming:
            pending.wait()
        told = torch.cat([self._server.norm.take()[None], step.told])
        if self._servers is not None:
            all_reduce(told[:1], self._servers, "norm")
            all_reduce(told[1:2], self._know, "loss")
        start_pull(told, self._replicas, "loss", 0).wait()
        squares, loss, weight = told.tolist()
        return squares, loss, weight
