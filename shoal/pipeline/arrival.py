"""The start of a stage's graph: a tensor that came from another stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ANCHOR = torch.empty(0, requires_grad=True)
"""What makes the node part of a graph; it never has a gradient."""


def arrive(received: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
    """``received`` itself, now the output of a node whose backward pass gives its gradient to ``keep``.

    A leaf would do as well, but neither a leaf nor a view of one may be modified in place, as the first layer of a
    stage may want to.
    """
    arrived: Tensor = _Arrival.apply(_ANCHOR, received, keep)  # type: ignore[no-untyped-call]
    return arrived


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        ctx.keep = keep
        ctx.mark_dirty(received)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.keep(gradient)
        return None, None, None
