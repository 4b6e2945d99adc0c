"""What a micro-batch comes to besides its loss: the losses of gates, and how many tokens each expert was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass
class Beside:
    """Of one micro-batch, by the name of the layer. What is recomputed is written down again, and no more for that.

    ``scale()`` is what the micro-batch's loss is multiplied by before its backward pass. A gate's loss is an end of the
    graph like the loss itself: with a ``scale`` its gradient begins where the backward pass comes to its layer, so that
    nothing need be handed on to the last layer. Without one it is in ``losses``, for whoever adds it to the loss.
    """

    scale: Callable[[], Tensor] | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    loads: dict[str, Tensor] = field(default_factory=dict)
    """int64 [E]: how many tokens were to go to each expert."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """int64 scalars: how many of these were not dropped."""

    def charge(self, layer: str, weights: Tensor, loss: Tensor, sharers: int) -> Tensor:
        """``weights``, through which the backward pass comes to ``loss``, a scalar, alike on ``sharers`` ranks."""
        if self.scale is None:
            self.losses[layer] = loss
            return weights
        self.losses[layer] = loss.detach() / sharers
        charged: Tensor = _Charged.apply(weights, loss, self.scale)  # type: ignore[no-untyped-call]
        return charged

    def note(self, layer: str, chosen_NE: Tensor, kept_NE: Tensor) -> None:
        """Tokens were ``chosen`` for experts, and ``kept``."""
        self.loads[layer], self.kept[layer] = chosen_NE.sum(0), kept_NE.sum()


class _Charged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, scale: Callable[[], Tensor]) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.scale().to(ctx.dtype), None
