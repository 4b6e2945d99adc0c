"""Rotary positions (Su et al. 2021): queries and keys turn by an angle that grows with their position."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from shoal.config import RopeScaling

Rope = tuple[Tensor, Tensor]
"""cos and sin of the angles, each [samples or 1, positions, 1, head_dim/2]."""


def rope_tables(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> Rope:
    """cos and sin of the rotary angles at ``positions`` [samples, positions], of ``dtype``.

    Pair i of a head turns by position · theta^(−2i/head_dim), less where there is a ``scaling``. Angles are computed
    in float32, or in float64 for a float64 model.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_dim, 2, dtype=exact, device=positions.device) / head_dim
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = _stretched(frequencies, scaling)
    angles = positions[..., None, None].to(exact) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slower by ``factor``: all of them (Chen et al. 2023), or, as in Llama 3.1, those that turn fewer than
    ``low_freq_factor`` times in the original length, none that turn more than ``high_freq_factor`` times, and in
    between a mean of both, weighted by where they stand."""
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = frequencies * (scaling.original_positions / (2 * pi))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * slow


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """``x`` [samples, positions, heads, head_dim] with its two halves rotated by the angles of ``rope``."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
