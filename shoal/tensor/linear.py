"""Column- and row-parallel linears (Megatron, Shoeybi et al. 2019).

Y = X·Wᵀ with the weight [out, in] divided by rows gives each rank some columns of Y, from the whole of X; divided by
columns it takes from each rank some columns of X, and Y is a sum over ranks. One after the other costs one entry from
the :mod:`stream <shoal.tensor.stream>` and one exit each way. Backward, the sum of the input's gradient is under way
while the weight's gradient is computed. Where entering moves words, the whole input is not kept but fetched again.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.model.linear import weight_gradient
from shoal.tensor.stream import Stream


class ColumnLinear(nn.Module):
    """Some output columns of ``linear``, which holds those rows of weight and bias; takes the stream [B, S, H].

    Returns [B, T, columns], or for a fused linear its outputs apart, of the widths ``parts``.
    """

    def __init__(self, linear: nn.Linear, stream: Stream, parts: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.stream, self.parts = stream, parts

    def forward(self, x_BSH: Tensor) -> Tensor | tuple[Tensor, ...]:
        y = self.columns(x_BSH)
        return y.split(self.parts, dim=-1) if self.parts else y

    def columns(self, x_BSH: Tensor) -> Tensor:
        y: Tensor = _Column.apply(x_BSH, self.weight, self.bias, self.stream, self.stream.positions(x_BSH))  # type: ignore[no-untyped-call]
        return y


class RowLinear(nn.Module):
    """``linear``, which holds some columns of the weight and the whole bias, of an input that is those columns [B, T,
    columns]. Returns the stream [B, S, H]."""

    def __init__(self, linear: nn.Linear, stream: Stream) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Row.apply(x, self.weight, self.bias, self.stream)  # type: ignore[no-untyped-call]
        return y


class _Column(Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, weight: Tensor, bias: Tensor | None, stream: Stream, positions: int) -> Tensor:
        ctx.save_for_backward(x_BSH)
        ctx.weight, ctx.stream, ctx.positions = weight, stream, positions
        return F.linear(stream.start_enter(x_BSH, positions).wait(), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (x_BSH,) = ctx.saved_tensors
        weight, stream = ctx.weight, ctx.stream
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        entering = stream.start_enter(x_BSH, ctx.positions) if needs_weight else None
        leaving = stream.start_leave(grad @ weight) if needs_x else None
        grad_weight = weight_gradient(weight, grad, entering.wait()) if entering else None
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        return leaving.wait() if leaving else None, grad_weight, grad_bias, None, None


class _Row(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stream: Stream) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.stream = weight, stream
        y_BSH = stream.start_leave(F.linear(x, weight)).wait()
        return y_BSH if bias is None else y_BSH.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        entering = ctx.stream.start_enter(grad_BSH, x.shape[1])
        grad_bias = grad_BSH.flatten(0, -2).sum(0) if needs_bias else None
        grad = entering.wait()
        grad_x = grad @ ctx.weight if needs_x else None
        grad_weight = weight_gradient(ctx.weight, grad, x) if needs_weight else None
        return grad_x, grad_weight, grad_bias, None
