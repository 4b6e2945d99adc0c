"""A linear map whose weight gradient can be made where gradients are kept.

Autograd makes the gradient of a weight as a new tensor, which someone then copies or adds into a buffer: a pass over
memory as large as the weight, in every micro-batch. A weight with a *sink* hands over the two factors instead, and the
product is computed into the buffer, or added to it, by the one kernel that computes it: at once, or when a pipeline has
nothing more urgent to do. Without a sink a :class:`Linear` is ``nn.Linear``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Sink(Protocol):
    """Takes in the gradient of one weight. Autograd then has none for it, and hooks on the weight do not run."""

    def later(self, contribution: Callable[[], None]) -> bool:
        """Whether the gradient is to be made later, by calling ``contribution``, which is kept."""

    def add(self, gradient: Tensor) -> None:
        """Add ``gradient`` (given up)."""

    def add_arriving(self, arrive: Callable[[], Tensor]) -> None:
        """Add what ``arrive`` returns when it has come, for which there is time until the next one is under way."""

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        """Add ``gradient`` times a scalar."""

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add leftᵀ·right to the gradient [out, in], now or later; ``left`` is [rows, out], ``right`` [rows, in]."""


def attach_sink(weight: nn.Parameter, sink: Sink) -> None:
    """Have every linear map by ``weight`` give its gradient to ``sink``, and autograd none of it."""
    weight.sink = sink  # type: ignore[attr-defined]


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """The gradient [out, in] of ``weight`` where y = x·weightᵀ, from the gradient of y [..., out] and x [..., in].

    None where the weight's sink has taken it.
    """
    left, right = _rows(grad), _rows(x)
    sink: Sink | None = getattr(weight, "sink", None)
    if sink is None:
        return left.t() @ right
    sink.add_product(left, right)
    return None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def later(weight: Tensor, contribution: Callable[[], None]) -> bool:
    """Whether the gradient of ``weight`` is to be made later, by calling ``contribution``, which its sink has kept."""
    sink: Sink | None = getattr(weight, "sink", None)
    return sink is not None and sink.later(contribution)


def whole_gradient(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """``gradient``, as that of ``weight``; None where its sink has taken it."""
    sink: Sink | None = getattr(weight, "sink", None)
    if sink is None:
        return gradient
    sink.add(gradient)
    return None


def arriving_gradient(weight: Tensor, arrive: Callable[[], Tensor]) -> Tensor | None:
    """What ``arrive`` returns when it has come, as the gradient of ``weight``; None where its sink takes it in."""
    sink: Sink | None = getattr(weight, "sink", None)
    if sink is None:
        return arrive()
    sink.add_arriving(arrive)
    return None


def scaled_gradient(weight: Tensor, gradient: Tensor, scale: Tensor) -> Tensor | None:
    """``gradient`` (given up) times a scalar, as the gradient of ``weight``; None where its sink has taken it."""
    sink: Sink | None = getattr(weight, "sink", None)
    if sink is None:
        return gradient.mul_(scale).to(weight.dtype)
    sink.add_scaled(gradient, scale)
    return None


class Linear(nn.Linear):
    """``nn.Linear``, whose weight may have a sink."""

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self.weight, "sink", None) is not None and torch.is_grad_enabled():
            y: Tensor = _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return y
        return F.linear(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # the parameter itself, which knows its sink; it outlives the graph
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if torch.is_grad_enabled():  # as `once_differentiable` says, which takes as long as the rest of this
            raise RuntimeError("a linear map whose gradient goes to a sink has no second derivative")
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad @ weight if needs_x else None
        grad_weight = weight_gradient(weight, grad, x) if needs_weight else None
        grad_bias = _rows(grad).sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias
