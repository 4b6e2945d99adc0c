"""The activations of feed-forwards, by name: as functions, and as what writes where it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """``kind`` is "silu", or "gelu" with its approximation, "none" or "tanh"."""

    kind: Literal["silu", "gelu"]
    approximate: str = "none"

    def __call__(self, x: Tensor) -> Tensor:
        return F.silu(x) if self.kind == "silu" else F.gelu(x, approximate=self.approximate)

    def into(self, x: Tensor, out: Tensor) -> None:
        """Write its values at ``x`` to ``out``."""
        if self.kind == "silu":
            _aten.silu.out(x, out=out)
        else:
            _aten.gelu.out(x, approximate=self.approximate, out=out)

    def back_into(self, grad: Tensor, x: Tensor, out: Tensor) -> None:
        """Write ``grad`` times its slope at ``x`` to ``out``."""
        if self.kind == "silu":
            _aten.silu_backward.grad_input(grad, x, grad_input=out)
        else:
            _aten.gelu_backward.grad_input(grad, x, approximate=self.approximate, grad_input=out)


ACTIVATIONS = {"silu": Activation("silu"), "gelu": Activation("gelu"), "gelu-tanh": Activation("gelu", "tanh")}
