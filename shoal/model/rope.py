"""Rotary positions (Su et al. 2021): queries and keys turn by an angle that grows with their position."""

from __future__ import annotations

from math import ceil, floor, log, pi

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
    in float32, or in float64 for a float64 model. YaRN makes both tables a little larger, so that scores do not flatten
    out over more positions.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_dim, 2, dtype=exact, device=positions.device) / head_dim
    frequencies = theta**-exponents
    size = 1.0
    if scaling is not None:
        frequencies = _stretched(frequencies, scaling, head_dim, theta)
        size = growth(scaling, scaling.mscale) / growth(scaling, scaling.mscale_all_dim)
    angles = positions[..., None, None].to(exact) * frequencies
    return (angles.cos() * size).to(dtype), (angles.sin() * size).to(dtype)


def growth(scaling: RopeScaling, weight: float) -> float:
    """How much YaRN makes queries or keys larger: 1 + 0.1·weight·ln(factor). Other kinds do not."""
    return 1.0 + 0.1 * weight * log(scaling.factor) if scaling.kind == "yarn" else 1.0


def _stretched(frequencies: Tensor, scaling: RopeScaling, head_dim: int, theta: float) -> Tensor:
    """Slower by ``factor``: all of them (Chen et al. 2023), or, as in Llama 3.1, those that turn fewer than
    ``low_freq_factor`` times in the original length, none that turn more than ``high_freq_factor`` times, and in
    between a mean of both, weighted by where they stand. YaRN (Peng et al. 2023) does the same between ``beta_slow``
    and ``beta_fast`` turns, the weight growing with the number of the pair and not with its turns."""
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "yarn":
        fast_end, slow_end = (
            _pair(turns, scaling, head_dim, theta) for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        first, last = max(floor(fast_end), 0), min(ceil(slow_end), head_dim - 1)
        pairs = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
        stretched = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
        return stretched * slow + (1.0 - stretched) * frequencies
    turns = frequencies * (scaling.original_positions / (2 * pi))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * slow


def _pair(turns: float, scaling: RopeScaling, head_dim: int, theta: float) -> float:
    """Which pair of a head turns so often in the original length."""
    return head_dim * log(scaling.original_positions / (2 * pi * turns)) / (2 * log(theta))


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """``x`` [samples, positions, heads, head_dim] with its two halves rotated by the angles of ``rope``."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
