"""What every layer may know of the micro-batch it works on: positions, documents, labels, keys for dropout.

It is made once per micro-batch, from the batch alone, so every pipeline stage can make it for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.model.dropout import Noise

Batch = Mapping[str, Tensor]


@dataclass
class Cache:
    """Keys and values [samples, kv_heads, positions, head_dim] that attention has seen, by the name of its block;
    ``length`` positions in all, once a batch has run."""

    kept: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    length: int = 0

    def following(self, tokens: Tensor) -> Batch:
        """The batch of ``tokens`` [samples, positions] that follow what has been seen: a prompt, then one position at
        a time."""
        assert self.length == 0 or tokens.shape[1] == 1, "after the prompt, one position at a time"
        positions = self.length + torch.arange(tokens.shape[1], device=tokens.device)
        self.length += tokens.shape[1]
        return {"tokens": tokens, "positions": positions[None]}

    def extend(self, block: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append to what ``block`` has seen and return all of it."""
        if (before := self.kept.get(block)) is not None:
            k, v = torch.cat((before[0], k), dim=2), torch.cat((before[1], v), dim=2)
        self.kept[block] = (k, v)
        return k, v


@dataclass
class Context:
    """``rope`` holds cos and sin, each [samples or 1, positions, 1, head_dim/2]; ``mask`` is bool
    [samples, 1, positions, positions], True where attention may look, or None for plain causal attention."""

    rope: tuple[Tensor, Tensor]
    mask: Tensor | None = None
    labels: Tensor | None = None
    noise: Noise | None = None
    cache: Cache | None = None

    def drop(self, x: Tensor, rate: float, site: str) -> Tensor:
        """Dropout of ``x`` at ``site`` while training, ``x`` itself otherwise."""
        return x if self.noise is None else self.noise.drop(x, rate, site)


def rope_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles (Su et al. 2021) at ``positions`` [samples, positions].

    Each is [samples, positions, 1, head_dim/2] of ``dtype``; angles are computed in float32, or in float64 for a
    float64 model.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_dim, 2, dtype=exact, device=positions.device) / head_dim
    angles = positions[..., None, None].to(exact) * theta**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """``x`` [samples, positions, heads, head_dim] with its two halves rotated by the angles of ``rope``."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def document_mask(documents: Tensor) -> Tensor:
    """Where attention may look when each document sees only itself: bool [samples, 1, positions, positions]."""
    causal = torch.ones(documents.shape[1], documents.shape[1], dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal
