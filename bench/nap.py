"""A stage that sleeps instead of computing, so that several ranks truly overlap on a machine with few cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Naps:
    """Seconds of a stage's passes: forward, the gradient of the input, the gradient of the weight."""

    forward: float
    input_gradient: float
    weight_gradient: float

    def divided(self, parts: int) -> Naps:
        """Of one of as many stages that a rank holds."""
        return Naps(self.forward / parts, self.input_gradient / parts, self.weight_gradient / parts)


class NapStage(nn.Module):
    """y = nap(x + bias) + weight, of any shape.

    The gradients of the input and of the weight are made at separate nodes of the graph, as those of ``nn.Linear`` are
    by separate products, so an engine may split the backward pass as it splits any: by walking the graph, or by
    ``waiting``, a list in which the weight's gradient waits while there is one. The bias lies below the first nap, so
    that the first stage has one to take backward too, though its input needs no gradient.
    """

    def __init__(self, naps: Naps, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.bias, self.weight = (nn.Parameter(torch.rand(1, generator=made)) for _ in range(2))
        self.naps = naps
        self.waiting: list[Callable[[], None]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _ForInput.apply(x + self.bias, self.naps) + _ForWeight.apply(self.weight, self)
        return y


def _nap(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


class _ForInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, naps: Naps) -> Tensor:
        ctx.naps = naps
        _nap(naps.forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _nap(ctx.naps.input_gradient)
        return gradient, None


class _ForWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, stage: NapStage) -> Tensor:
        ctx.stage = stage
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        stage: NapStage = ctx.stage
        if stage.waiting is not None:
            stage.waiting.append(partial(_add_gradient, stage, gradient))
            return None, None
        _nap(stage.naps.weight_gradient)
        return gradient, None


def _add_gradient(stage: NapStage, gradient: Tensor) -> None:
    _nap(stage.naps.weight_gradient)
    grad = stage.weight.grad
    stage.weight.grad = gradient if grad is None else grad + gradient


def mean(output: Tensor, _: object) -> Tensor:
    """The loss."""
    return output.mean()
