"""The norms that decoders use, by the name of the setting."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config import Model as Shape


class RMSNormPlusOne(nn.Module):
    """An RMS norm whose scale is 1 + weight, so that weights near zero change little (Gemma)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # In half precision 1 + weight would lose what the weight has learnt.
        exact = torch.promote_types(x.dtype, torch.float32)
        scale = 1.0 + self.weight.to(exact)
        return F.rms_norm(x.to(exact), scale.shape, scale, self.eps).to(x.dtype)


NORMS = {"rms": nn.RMSNorm, "rms-plus-one": RMSNormPlusOne, "layer": nn.LayerNorm}


def norm_of(shape: Shape, width: int) -> nn.Module:
    """The norm of ``width`` features that a model of ``shape`` has."""
    return NORMS[shape.norm](width, shape.norm_eps)  # type: ignore[no-any-return]
