"""Training steps that overlap: asynchronous pipelines (PipeDream, Narayanan et al. 2019; PipeDream-2BW, 2021).

No stage waits for the end of a step. One begins while the last micro-batches of the step before are still on their way
back, with weights that lack their gradients: under PipeDream each stage updates after each of its backward passes, by
the norm of its own gradients, which is all that it can know; under 2BW all stages update once a step, two steps later
than its gradients began, which leaves time to agree on the norm of all of them. So a step's result is known only when
later ones have begun. :meth:`Flow.drain` ends what is under way, and the next step begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan, sqrt
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import Pending, start_all_reduce
from shoal.comm.world import Group
from shoal.config import Optimizer
from shoal.data_parallel.sync import Sync
from shoal.errors import Diverged
from shoal.model.context import Batch
from shoal.optim.clip import clip_factor
from shoal.optim.guard import Guard
from shoal.optim.optimizers import Updater
from shoal.pipeline.executor import Running
from shoal.pipeline.stream import Stream
from shoal.pipeline.weights import Weights
from shoal.result import StepResult


@dataclass
class _Step:
    """A step under way. ``scales`` multiply the loss of each micro-batch; ``scale`` is that of the loss under fp16,
    which is in them."""

    number: int
    first: int
    weights: Tensor
    agreed: Pending
    scale: float
    loss: Tensor
    norm: tuple[Tensor, Pending] | None = None
    squares: float = 0.0
    lr: float = 0.0
    bad: int = 0
    place: int = 0
    """Where its gradients are (see :meth:`Sync.turn`)."""
    told: tuple[Tensor, Pending] | None = None
    scales: Tensor | None = field(default=None, repr=False)


class Flow:
    """The steps of one rank. ``stage`` are the ranks that hold the same stage, ``losses`` those that know the loss of a
    step between them; ``rate(step)`` scales the learning rate."""

    def __init__(
        self,
        stream: Stream,
        begin: Callable[[Callable[[int], Tensor]], Running],
        sync: Sync,
        weights: Weights,
        updater: Updater,
        guard: Guard,
        optimizer: Optimizer,
        rate: Callable[[int], float],
        *,
        units: Iterable[int],
        stage: Group,
        replicas: Group,
        losses: Group,
    ) -> None:
        self._stream, self._sync, self._weights = stream, sync, weights
        self._updater, self._guard, self._optimizer, self._rate = updater, guard, optimizer, rate
        self._units, self._stage, self._replicas, self._losses = list(units), stage, replicas, losses
        self._running = begin(self._scale)
        self._open: deque[_Step] = deque()
        self._begun = 0
        """Steps since the stream began."""

    def step(
        self, number: int, batches: Sequence[Batch], weights: Tensor, contexts: Callable[[Batch], Any]
    ) -> list[StepResult]:
        """Begin step ``number`` (counted from 0) on ``batches``, whose ``weights`` (float64) are what this replica has
        of their losses' denominators. Returns the results of the steps that have finished meanwhile."""
        stream, m = self._stream, len(batches)
        if self._begun == 0:
            self._sync.begin()
        together = weights if stream.per_micro_batch else weights.sum().expand(m).clone()
        step = _Step(
            number,
            self._begun * m,
            together,
            start_all_reduce(together, self._replicas, "weight"),
            self._guard.scale,
            torch.zeros_like(together[0]),
        )
        self._open.append(step)
        self._running.go(stream.step(self._begun), batches, contexts, step.first)
        step.loss = self._running.take_loss()
        self._weights.use(self._weights.newest)
        self._begun += 1
        self._tell(stream.lag)
        return self._collect(stream.lag + 1)

    def drain(self) -> list[StepResult]:
        """End everything under way; returns the results of the steps that it ends."""
        if self._begun == 0:
            return []
        last = self._open[-1]
        following = last.first + len(last.weights)
        self._running.go(self._stream.drain(self._begun), (), lambda _: None, following)
        self._running.check_done()
        self._weights.use(self._weights.newest)
        self._begun = 0
        self._tell(0)
        return self._collect(0)

    # ---- what the stream's actions mean

    def reduce(self, stage: int, first: int) -> None:
        """The gradients of a batch are complete on this rank."""
        self._sync.reduce(self._units)
        if not self._stream.per_micro_batch:
            self._sync.depart()
            self._find(first).place = self._sync.filling
            self._sync.turn()

    def norm(self, first: int) -> None:
        """Begin to agree on the norm, where all stages do."""
        if not self._stream.per_micro_batch:
            step = self._find(first)
            with self._sync.view(step.place):
                self._sync.finish()
            step.norm = self._sync.start_norm()

    def update(self, first: int) -> None:
        """Apply the gradients of a batch to the newest weights."""
        step, alone = self._find(first), self._stream.per_micro_batch
        if alone:
            self._sync.finish()
            norm = self._sync.norm(self._stage) / step.scale
        else:
            assert step.norm is not None
            squares, pending = step.norm
            pending.wait()
            norm = sqrt(squares.item()) / step.scale
        if alone:
            step.squares += norm**2 / len(step.weights) * self._stream.ranks / self._losses.size
            passes = isfinite(norm)
        else:
            step.squares, passes = norm**2, self._guard.passes(norm, step.scale)
            self._check(step, norm)
        step.bad += not passes
        with self._sync.view(self._sync.filling if alone else step.place):
            if passes:
                factor = clip_factor(norm, self._optimizer.clip) / step.scale
                step.lr = self._updater.update(self._rate(step.number), factor)
                self._weights.advance()
            self._sync.updated(aside=not alone, skipped=not passes)
        if alone:
            self._sync.begin()

    def _scale(self, micro_batch: int) -> Tensor:
        step = self._find(micro_batch)
        if step.scales is None:
            step.agreed.wait()
            known = torch.where(step.weights > 0, step.scale / step.weights, 0.0)
            step.scales = torch.where(step.weights.isfinite(), known, torch.nan)
        return step.scales[micro_batch - step.first]

    def _find(self, micro_batch: int) -> _Step:
        return next(step for step in self._open if step.first <= micro_batch < step.first + len(step.weights))

    # ---- results

    def _tell(self, lag: int) -> None:
        """Begin to add up what ranks know of the steps that no rank works on any more: all but the last ``lag``."""
        for step in list(self._open)[: max(0, len(self._open) - lag)]:
            if step.told is None:
                of_stage = step.squares if self._stream.per_micro_batch else 0.0
                known = torch.stack([step.loss, step.loss.new_tensor(of_stage), step.loss.new_tensor(float(step.bad))])
                step.told = known, start_all_reduce(known, self._losses, "loss")

    def _collect(self, lag: int) -> list[StepResult]:
        found = []
        while len(self._open) > lag:
            step = self._open.popleft()
            assert step.told is not None
            known, pending = step.told
            pending.wait()
            step.agreed.wait()
            loss, squares, bad = known.tolist()
            per_micro_batch = self._stream.per_micro_batch
            norm = sqrt(squares if per_micro_batch else step.squares) if not bad else nan
            if per_micro_batch:
                self._guard.passes(norm, step.scale)
                self._check(step, norm)
            # Where each micro-batch is a batch of its own, its mean loss is the loss of a step of one.
            counted = float(step.weights.sum() if per_micro_batch else step.weights[0])
            found.append(
                StepResult(step.number + 1, loss / counted if counted else 0.0, norm, step.lr, counted, skipped=bad > 0)
            )
        return found

    def _check(self, step: _Step, norm: float) -> None:
        if self._guard.exhausted:
            raise Diverged(
                f"step {step.number + 1}: the gradient norm is {norm}; nothing was updated "
                f"(step {self._guard.in_a_row} in a row). Go on from the last checkpoint with a lower optimizer.lr "
                f"(it is {self._optimizer.lr}) or a longer warm-up"
            )
