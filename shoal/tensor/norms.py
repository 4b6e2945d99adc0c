"""Norms of features that are divided over ranks, as grids of tensor parallelism have them.

A row's statistics are of all its features, its result is made feature by feature: ranks exchange one or two numbers a
row each way. For an RMS norm (Zhang and Sennrich 2019) sums of squares add up. For a layer norm (Ba et al. 2016) each
rank's mean and variance are gathered and merged (Chan, Golub and LeVeque 1979), since from Σx and Σx² nothing is left
of the variance where the mean is large.

With x̂ = (x − μ)/σ and g the gradient of x̂, that of x is (g − mean(g) − x̂·mean(g·x̂))/σ; an RMS norm has neither μ
nor mean(g).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.comm.differentiable import start_gather, start_sum
from shoal.comm.world import Group
from shoal.errors import LayoutError, setting
from shoal.model.norms import NORMS, RMSNormPlusOne

PURPOSE = "norms"


def divided_norm(module: nn.Module, group: Group) -> nn.Module:
    """What takes the place of a norm that has this rank's block of weight and bias: the same, under the same names.

    ``module`` is an ``nn.RMSNorm``, an ``nn.LayerNorm`` or an :class:`~shoal.model.norms.RMSNormPlusOne`, of a width
    that the ranks of ``group`` have in equal blocks, in the group's order; only its ``eps``, weight and bias are read.
    Raises :class:`LayoutError` for any other module, since what that computes is not known, and for one over several
    dims.
    """
    if group.size == 1:
        return module
    # Not their subclasses, which may compute something else.
    if type(module) not in NORMS.values():
        known = ", ".join(norm.__name__ for norm in NORMS.values())
        problem = f"its features cannot be divided over {group.size} ranks"
        raise LayoutError(setting("norm", type(module).__name__, problem, f"use one of {known}, or tp=N:1d"))
    if len(shape := getattr(module, "normalized_shape", (0,))) > 1:
        problem = f"only norms over one dim can be divided over {group.size} ranks"
        raise LayoutError(setting("norm", f"{type(module).__name__} of {tuple(shape)}", problem, "use tp=N:1d"))
    return DividedNorm(cast(nn.RMSNorm | RMSNormPlusOne | nn.LayerNorm, module), group)


class DividedNorm(nn.Module):
    """Some features of a norm: x [..., this rank's] to the same ones of the result, of the dtype of x.

    As in the whole norm, everything is computed in float32 at least and rounded once.
    """

    def __init__(self, norm: nn.RMSNorm | RMSNormPlusOne | nn.LayerNorm, group: Group) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.eps: float | None = norm.eps
        self.centred, self.plus_one = isinstance(norm, nn.LayerNorm), isinstance(norm, RMSNormPlusOne)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        exact = _exact(x.dtype)
        scale = 1.0 + self.weight.to(exact) if self.plus_one else self.weight
        eps = torch.finfo(exact).eps if self.eps is None else self.eps
        y: Tensor = _Norm.apply(x, scale, self.bias, eps, self.centred, self.group)  # type: ignore[no-untyped-call]
        return y


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None, eps: float, centred: bool, group: Group
    ) -> Tensor:
        exact = x.to(_exact(x.dtype))
        mean, square = _moments(exact, group) if centred else (None, _mean_square(x, group))
        inverse = square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, mean, inverse, scale)
        ctx.group, ctx.bias_dtype = group, None if bias is None else bias.dtype
        y = _normal(exact, mean, inverse)
        if scale is not None:
            y.mul_(scale)
        if bias is not None:
            y.add_(bias)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse, scale = ctx.saved_tensors
        needs_x, needs_scale, needs_bias, *_ = ctx.needs_input_grad
        grad = grad.to(inverse.dtype)
        normal = _normal(x.to(inverse.dtype), mean, inverse)
        grad_x = grad_scale = grad_bias = None
        if needs_x:
            grad_normal = grad if scale is None else grad * scale
            along = (grad_normal * normal).sum(-1, keepdim=True)
            sums = along[None] if mean is None else torch.stack((along, grad_normal.sum(-1, keepdim=True)))
            summing = start_sum(sums, ctx.group, PURPOSE)
        if needs_scale:
            grad_scale = (grad * normal).sum_to_size(scale.shape).to(scale.dtype)
        if needs_bias:
            grad_bias = grad.sum_to_size(grad.shape[-1:]).to(ctx.bias_dtype)
        if needs_x:
            means = summing.wait().div_(x.shape[-1] * ctx.group.size)
            grad_x = torch.addcmul(grad_normal, normal, means[0], value=-1)
            if mean is not None:
                grad_x.sub_(means[1])
            grad_x = grad_x.mul_(inverse).to(x.dtype)
        return grad_x, grad_scale, grad_bias, None, None, None


def _mean_square(x: Tensor, group: Group) -> Tensor:
    """The mean [..., 1] of the squares of all features."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_exact(x.dtype)).contiguous()
    return start_sum(norm.square_(), group, PURPOSE).wait().div_(x.shape[-1] * group.size)


def _moments(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Mean and variance [..., 1] of all features: of equal blocks, the mean of their means, and the mean of their
    variances plus the variance of their means."""
    mean = x.mean(-1, keepdim=True)
    away = x - mean
    error = away.mean(-1, keepdim=True)  # what rounding left of a mean much larger than the deviations from it
    own = torch.stack((mean + error, away.sub_(error).square_().mean(-1, keepdim=True)))
    means, variances = start_gather(own[None], 0, group.size, group, PURPOSE).wait().unbind(1)
    between, mean = torch.var_mean(means, 0, correction=0)
    return mean, variances.mean(0).add_(between)


def _normal(x: Tensor, mean: Tensor | None, inverse: Tensor) -> Tensor:
    """x̂, a new tensor."""
    return x * inverse if mean is None else (x - mean).mul_(inverse)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What statistics are of."""
    return torch.promote_types(dtype, torch.float32)
