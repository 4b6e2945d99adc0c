"""A linear map divided over a grid of ranks, of any dimension.

Y = X·Wᵀ with what enters gathered before the product and what leaves summed after it (:mod:`shoal.tensor.ports`): that
is one form for the column- and row-parallel linears of one dimension (Megatron, Shoeybi et al. 2019), for SUMMA on a
square (Optimus, Xu et al. 2021), and for the product on a cube or any a×b×c (Bian et al. 2021). Only this rank's own
blocks are kept for the backward pass, which fetches the others again.

Backward, dX = dY·W and dW = dYᵀ·X: X is on its way while dX is computed, and dX while dW is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.model.linear import later, weight_gradient
from shoal.tensor.blocks import block_linear
from shoal.tensor.ports import Port, Ports, entered


class DividedLinear(nn.Module):
    """``linear``, which holds this rank's blocks of weight and bias, of this rank's block of the input; returns that of
    the output, or for a fused linear those of its outputs, of the widths ``parts``."""

    def __init__(self, linear: nn.Linear, ports: Ports, parts: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.ports, self.parts = ports, parts

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        y = self.block(x)
        return y.split(self.parts, dim=-1) if self.parts else y

    def block(self, x: Tensor) -> Tensor:
        return divided_linear(x, self.weight, self.bias, self.ports)


class Entry(nn.Module):
    """What several linears with blocks of their own read, put together once for all of them."""

    def __init__(self, port: Port) -> None:
        super().__init__()
        self.port = port

    def forward(self, x: Tensor) -> Tensor:
        return entered(x, self.port)


def divided_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ports: Ports) -> Tensor:
    """This rank's block of the output [..., out], of its blocks of the input [..., in], ``weight`` and ``bias``."""
    if ports.weight.parts > 1:
        return block_linear(x, weight, bias, ports)
    y: Tensor = _Linear.apply(x, weight, bias, ports)  # type: ignore[no-untyped-call]
    return y


class _Linear(Function):
    """Of a weight that is here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ports: Ports) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.ports, x_length = weight, ports, ports.x.full(x)
        alone = not ports.y.sums
        term = F.linear(ports.x.start_enter(x, x_length).wait(), weight, bias if alone else None)
        ctx.lengths = x_length, term.shape[ports.y.dim]
        y = ports.y.start_leave(term).wait()
        return y if bias is None or alone else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        weight, ports = ctx.weight, ctx.ports
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        entering_y = ports.y.start_enter(grad, ctx.lengths[1])
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        needs_weight = needs_weight and not later(weight, partial(_later, weight, x, grad, ports, ctx.lengths))
        entering_x = ports.x.start_enter(x, ctx.lengths[0]) if needs_weight else None
        grad = entering_y.wait()
        leaving_x = ports.x.start_leave(grad @ weight) if needs_x else None
        grad_weight = weight_gradient(weight, grad, entering_x.wait()) if entering_x else None
        return leaving_x.wait() if leaving_x else None, grad_weight, grad_bias, None


def _later(weight: Tensor, x: Tensor, grad: Tensor, ports: Ports, lengths: tuple[int, int]) -> None:
    """What came for the gradient of X is fetched again rather than kept."""
    entering_x, entering_y = ports.x.start_enter(x, lengths[0]), ports.y.start_enter(grad, lengths[1])
    weight_gradient(weight, entering_y.wait(), entering_x.wait())
