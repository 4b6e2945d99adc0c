"""Runs a Program: the forward and backward passes of this rank's stages, and the step's reductions and update.

What reducing, taking the norm and updating mean is handed in, so that the executor is the same whatever shards the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.model.context import Batch
from shoal.model.task import Task
from shoal.pipeline.program import Act, Op, Program


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of the model, each with the number of its unit (the layer's place in the whole model)."""

    layers: tuple[tuple[int, nn.Module], ...]


@dataclass(frozen=True)
class Handlers:
    """What the engine does at the actions that are not passes.

    ``unit_done(unit, final)`` is called in every backward pass as soon as its gradients of a unit are complete, last
    unit first; ``final`` says that no further pass of the step will add to them. ``reduce(stage)`` comes after the
    last pass of a stage.
    """

    unit_done: Callable[[int, bool], None]
    reduce: Callable[[int], None]
    norm: Callable[[], None]
    update: Callable[[], None]


class _Watch:
    """Follows one backward pass of a stage and calls ``done(unit, final)`` for each of its units, last first.

    Autograd runs the newest nodes first: when the gradient of a layer's input is complete, every gradient of its
    parameters has been accumulated, and so has every one of the layers after it. A leaf is no such input: its gradient
    is accumulated before anything else.
    """

    def __init__(self, stage: Stage, done: Callable[[int, bool], None], final: bool) -> None:
        self._waiting = [unit for unit, _ in stage.layers]
        self._done, self._final = done, final

    def input_done(self, unit: int, gradient: Tensor) -> None:
        """A hook on the input of ``unit``."""
        while self._waiting and self._waiting[-1] >= unit:
            self._done(self._waiting.pop(), self._final)

    def rest(self) -> None:
        """The pass is over: also where a layer's input needs no gradient, as that of the first does not."""
        while self._waiting:
            self._done(self._waiting.pop(), self._final)


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
        watches: dict[int, _Watch] = {}
        total: list[Tensor] = []
        for act in program.actions:
            match act.op:
                case Op.FORWARD:
                    final = program.final_backward(act.stage) == act.micro_batch
                    watch = _Watch(self._stages[act.stage], self._handlers.unit_done, final)
                    loss = self._forward(act, batches[act.micro_batch], contexts, watch)
                    losses[act.micro_batch], watches[act.micro_batch] = loss, watch
                    total.append(loss.detach())
                case Op.BACKWARD:
                    loss = losses.pop(act.micro_batch)
                    if loss.requires_grad:  # it may depend on no parameter here, and on some elsewhere
                        torch.autograd.backward(loss, scale().to(loss.dtype))
                    watches.pop(act.micro_batch).rest()
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
                [self._forward(act, batches[act.micro_batch], contexts) for act in program.actions]
            ).sum()

    def _forward(self, act: Act, batch: Batch, contexts: Callable[[Batch], Any], watch: _Watch | None = None) -> Tensor:
        ctx = contexts(batch)
        x = self._task.enter(batch)
        if x.is_leaf and x.requires_grad:
            x = x.view_as(x)  # see _Watch: the input of the first layer must be older than all that follows
        for unit, layer in self._stages[act.stage].layers:
            if watch is not None and isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(partial(watch.input_done, unit))
            x = self._task.apply_layer(layer, x, ctx)
        return self._task.loss(x, ctx)
