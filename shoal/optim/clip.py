"""The exact norm of all gradients, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from shoal.comm.collectives import all_reduce
from shoal.comm.world import Group

_ROW = 4096


def global_norm(parts: Sequence[tuple[Tensor, int]], everyone: Group) -> float:
    """The 2-norm of the gradients of all ranks, each logical element counted once.

    ``parts`` are this rank's flat gradients, each with the number of ranks that hold a copy of it. Where every rank
    holds everything, each computes the norm alone; else the shares are summed over ``everyone``.
    """
    if not parts:
        return 0.0
    shares = torch.stack([squared_norm(part) / copies for part, copies in parts]).sum()
    if all(copies == everyone.size for _, copies in parts):
        return sqrt(shares.item() * everyone.size)
    all_reduce(shares, everyone, "norm")
    return sqrt(shares.item())


def squared_norm(x: Tensor) -> Tensor:
    """The sum of squares of a flat tensor, a float64 scalar.

    One float32 accumulator over ten million elements would be off in the fourth digit; rows of 4,096 summed in float32
    and added in float64 are not.
    """
    even = len(x) // _ROW * _ROW
    norms = torch.linalg.vector_norm(x[:even].view(-1, _ROW), dim=1).double()
    total: Tensor = norms.dot(norms) + torch.linalg.vector_norm(x[even:].double()).square()
    return total


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied by so that it does not exceed ``limit``; 0 means no limit."""
    return 1.0 if limit == 0 or norm <= limit else limit / norm
