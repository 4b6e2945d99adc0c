"""The exact norm of all gradients, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from shoal.comm.collectives import all_reduce
from shoal.comm.world import Group

_ROW = 4096


def global_norm(parts: Sequence[tuple[Tensor, int]], group: Group) -> float:
    """The 2-norm of all gradients that the ranks of ``group`` hold, each logical element counted once.

    ``parts`` are this rank's flat gradients, each with the number of ranks of the group that hold a copy of it. A rank
    that holds everything may compute the norm in a group of its own, without communication.
    """
    total = torch.zeros((), dtype=torch.float64, device=parts[0][0].device if parts else None)
    for part, copies in parts:
        total += squared_norm(part) / copies
    all_reduce(total, group, "norm")
    return sqrt(total.item())


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
