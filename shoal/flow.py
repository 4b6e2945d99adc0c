"""Training steps that overlap: asynchronous pipelines (PipeDream, Narayanan et al. 2019; PipeDream-2BW, 2021).

No stage waits for the end of a step. One begins while the last micro-batches of the step before are still on their way
back, with weights that lack their gradients: under PipeDream each stage updates after each of its backward passes, by
the norm of its own gradients, which is all that it can know; under 2BW all stages update once a step, two steps later
than its gradients began, which leaves time to agree on the norm of all of them. So a step's result is known only when
later ones have begun: :meth:`Flow.finished` has it then. :meth:`Flow.drain` ends what is under way, and the next step
begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan, sqrt
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import Pending, all_reduce, start_all_reduce
from shoal.comm.world import Group
from shoal.config import Optimizer
from shoal.data_parallel.sync import Sync
from shoal.errors import Diverged
from shoal.feed import loss_scale
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
    bad: list[int] = field(default_factory=list)
    """The batches whose gradients this rank found not to be finite, by their first micro-batch."""
    place: int = 0
    """Where its gradients are (see :meth:`Sync.turn`)."""
    told: tuple[Tensor, Pending] | None = None
    end: Diverged | None = None
    """What ends the run with its result."""
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
        stage: Group,
        replicas: Group,
        losses: Group,
    ) -> None:
        self._stream, self._sync, self._weights = stream, sync, weights
        self._updater, self._guard, self._optimizer, self._rate = updater, guard, optimizer, rate
        self._stage, self._replicas, self._losses = stage, replicas, losses
        self._running = begin(self._scale)
        self._open: deque[_Step] = deque()
        self._finished: list[StepResult] = []
        self._begun = 0
        """Steps since the stream began."""

    @property
    def under_way(self) -> bool:
        """Whether steps have begun that have not ended."""
        return self._begun > 0

    def finished(self) -> list[StepResult]:
        """The results of the steps that have ended since this was last asked, in order."""
        found, self._finished = self._finished, []
        return found

    def step(self, number: int, batches: Sequence[Batch], weights: Tensor, contexts: Callable[[Batch], Any]) -> None:
        """Begin step ``number`` (counted from 0) on ``batches``, whose ``weights`` (float64) are what this replica has
        of their losses' denominators, and end those that no rank works on any more."""
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
        try:
            self._running.go(stream.step(self._begun), batches, contexts, step.first)
        except Exception as error:
            own = f"{step.first} to {step.first + m - 1}"
            error.add_note(f"in step {number + 1}, whose own micro-batches are number {own} since the stream began")
            raise
        step.loss = self._running.take_loss()
        self._weights.use(self._weights.newest)
        self._begun += 1
        self._tell(stream.lag)
        self._collect(stream.lag + 1)

    def drain(self) -> None:
        """End everything under way, of which there is something."""
        assert self.under_way
        last = self._open[-1]
        following = last.first + len(last.weights)
        self._running.go(self._stream.drain(self._begun), (), lambda _: None, following)
        self._running.check_done()
        self._weights.settle()
        self._begun = 0
        self._tell(0)
        self._collect(0)

    # ---- what the stream's actions mean

    def reduce(self, units: Iterable[int], first: int) -> None:
        """The gradients of a batch are complete on this rank, which has ``units``."""
        self._sync.reduce(units)
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
            step.norm = self._sync.norm.start()

    def update(self, first: int) -> None:
        """Apply the gradients of a batch to the newest weights."""
        step, alone = self._find(first), self._stream.per_micro_batch
        if alone:
            self._sync.finish()
            norm = self._sync.norm.find(self._stage) / step.scale
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
            step.end = self._guard.end(step.number + 1, norm, self._optimizer.lr)
        if not passes:
            step.bad.append(first)
        with self._sync.view(self._sync.filling if alone else step.place):
            if passes:
                factor = clip_factor(norm, self._optimizer.clip) / step.scale
                self._weights.advance()
                step.lr = self._updater.update(self._rate(step.number), factor)
            else:
                self._weights.stay()
            self._sync.updated(aside=not alone, skipped=not passes)
        if alone:
            self._sync.begin()

    def _scale(self, micro_batch: int) -> Tensor:
        step = self._find(micro_batch)
        if step.scales is None:
            step.agreed.wait()
            step.scales = loss_scale(step.weights, step.scale)
        return step.scales[micro_batch - step.first]

    def _find(self, micro_batch: int) -> _Step:
        return next(step for step in self._open if step.first <= micro_batch < step.first + len(step.weights))

    # ---- results

    def _tell(self, lag: int) -> None:
        """Begin to add up what ranks know of the steps that no rank works on any more: all but the last ``lag``."""
        for step in list(self._open)[: max(0, len(self._open) - lag)]:
            if step.told is None:
                of_stage = step.squares if self._stream.per_micro_batch else 0.0
                bad = [float(step.first + number in step.bad) for number in range(len(step.weights))]
                known = torch.cat([step.loss[None], step.loss.new_tensor([of_stage, *bad])])
                step.told = known, start_all_reduce(known, self._losses, "loss")

    def _collect(self, lag: int) -> None:
        while len(self._open) > lag:
            step = self._open.popleft()
            assert step.told is not None
            known, pending = step.told
            pending.wait()
            step.agreed.wait()
            loss, squares, *found = known.tolist()
            bad = tuple(number for number, ranks in enumerate(found) if ranks)
            per_micro_batch = self._stream.per_micro_batch
            norm = sqrt(squares if per_micro_batch else step.squares) if not bad else nan
            if per_micro_batch:
                self._guard.passes(norm, step.scale)
                step.end = self._guard.end(step.number + 1, norm, self._optimizer.lr, bad)
            if step.end is not None:
                raise step.end
            # Where each micro-batch is a batch of its own, its mean loss is the loss of a step of one.
            counted = float(step.weights.sum() if per_micro_batch else step.weights[0])
            mean = loss / counted if counted else 0.0
            alone = bad if per_micro_batch else ()
            self._finished.append(StepResult(step.number + 1, mean, norm, step.lr, counted, bool(bad), alone))


def updates_by_layer(
    made: int, units: Sequence[int], layers: int, pipeline: Group, device: torch.device
) -> int | list[int]:
    """How many updates the optimizer states of a model of so many ``layers`` stand for, ``made`` of those in ``units``
    on this rank: one number, or where stages have skipped some by themselves, one for each layer."""
    counts = torch.zeros(layers, dtype=torch.int64, device=device)
    counts[list(units)] = made
    all_reduce(counts, pipeline, "checkpoint", "max")
    found: list[int] = counts.tolist()
    return found[0] if len(set(found)) == 1 else found


def updates_of(told: float | Sequence[int], units: Iterable[int]) -> int:
    """Of the layers in ``units``: the most, where :func:`updates_by_layer` has told several numbers."""
    return max(told[unit] for unit in units) if isinstance(told, Sequence) else int(told)
