"""The exact norm of all gradients, wherever they lie."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from shoal.comm.collectives import all_reduce
from shoal.comm.world import Group

_ROW = 4096


def global_norm(squares: Tensor, group: Group) -> float:
    """The 2-norm of what the ranks of ``group`` hold between them.

    ``squares`` is this rank's share of the sum of squares (see :func:`squared_norm`), a float64 scalar in which each
    element is divided by the number of ranks in the group that hold a copy of it, so that it counts once. It becomes
    the sum over the group.
    """
    all_reduce(squares, group, "norm")
    return sqrt(squares.item())


def squared_norm(x: Tensor) -> Tensor:
    """The sum of squares of a flat tensor, a float64 scalar.

    One float32 accumulator over ten million elements would be off in the fourth digit; rows of 4,096 summed in float32
    and added in float64 are not.
    """
    even = len(x) // _ROW * _ROW
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x[:even].view(-1, _ROW), dim=1, dtype=wide).double()
    total: Tensor = norms.dot(norms) + torch.linalg.vector_norm(x[even:].double()).square()
    return total


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied by so that it does not exceed ``limit``; 0 means no limit."""
    return 1.0 if limit == 0 or norm <= limit else limit / norm
