"""Runs a Program: the forward and backward passes of this rank's stages, and the step's reductions and update.

What reducing, taking the norm and updating mean is handed in, so that the executor is the same whatever shards the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.model.task import Batch, Task
from shoal.pipeline.program import Act, Op, Program


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of the model, each with the number of its unit (the layer's place in the whole model)."""

    layers: tuple[tuple[int, nn.Module], ...]


@dataclass(frozen=True)
class Handlers:
    """What the engine does at the actions that are not passes.

    ``unit_done(unit)`` is called in the last backward pass of a stage as soon as the gradients of a unit are complete,
    in the order in which they complete; ``reduce(stage)`` after that pass, when all of them are.
    """

    unit_done: Callable[[int], None]
    reduce: Callable[[int], None]
    norm: Callable[[], None]
    update: Callable[[], None]


class Executor:
    """Runs programs over the stages that this rank holds."""

    def __init__(self, task: Task, stages: Mapping[int, Stage], handlers: Handlers) -> None:
        self._task, self._stages, self._handlers = task, stages, handlers

    def train(
        self,
        program: Program,
        batches: Sequence[Batch],
        contexts: Callable[[Batch], Any],
        scale: Callable[[], Tensor],
    ) -> Tensor:
        """One training step over the micro-batches ``batches``; returns the summed loss, a scalar.

        ``scale()`` is what each micro-batch's summed loss is multiplied by before its backward pass; it is first
        asked for after a forward pass, so that agreeing on it costs no waiting.
        """
        losses: dict[int, Tensor] = {}
        total: list[Tensor] = []
        for act in program.actions:
            match act.op:
                case Op.FORWARD:
                    watched = program.final_backward(act.stage) == act.micro_batch
                    loss = self._forward(act, batches[act.micro_batch], contexts, watched)
                    losses[act.micro_batch] = loss
                    total.append(loss.detach())
                case Op.BACKWARD:
                    loss = losses.pop(act.micro_batch)
                    torch.autograd.backward(loss, scale().to(loss.dtype))
                case Op.REDUCE:
                    self._handlers.reduce(act.stage)
                case Op.NORM:
                    self._handlers.norm()
                case Op.UPDATE:
                    self._handlers.update()
        assert not losses, "every forward pass of a step has its backward pass"
        return torch.stack(total).sum()

    def evaluate(self, program: Program, batches: Sequence[Batch], contexts: Callable[[Batch], Any]) -> Tensor:
        """The summed loss of a forward-only program."""
        with torch.no_grad():
            return torch.stack(
                [self._forward(act, batches[act.micro_batch], contexts, False) for act in program.actions]
            ).sum()

    def _forward(self, act: Act, batch: Batch, contexts: Callable[[Batch], Any], watched: bool) -> Tensor:
        ctx = contexts(batch)
        x = self._task.enter(batch)
        for unit, layer in self._stages[act.stage].layers:
            if watched and x.requires_grad:
                # Autograd runs the newest nodes first: when the gradient of a layer's input is complete, every
                # gradient of its parameters has been accumulated.
                x.register_hook(lambda _, unit=unit: self._handlers.unit_done(unit))
            x = self._task.apply_layer(layer, x, ctx)
        return self._task.loss(x, ctx)
