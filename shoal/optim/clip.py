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


def squared_norm(*tensors: Tensor) -> Tensor:
    """The sum of squares of all elements of tensors of any shape, a float64 scalar.

    One float32 accumulator over ten million elements would be off in the fourth digit; rows of up to 4,096 summed in
    float32 and added in float64 are not.
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = []
    for x in tensors:
        if x.numel() <= _ROW:
            norms.append(torch.linalg.vector_norm(x, dtype=wide).view(1))
        elif x.ndim > 1 and x.shape[-1] <= _ROW:
            norms.append(torch.linalg.vector_norm(x, dim=-1, dtype=wide).view(-1))
        else:
            flat, even = x.reshape(-1), x.numel() // _ROW * _ROW
            norms.append(torch.linalg.vector_norm(flat[:even].view(-1, _ROW), dim=1, dtype=wide))
            norms.append(torch.linalg.vector_norm(flat[even:], dtype=wide).view(1))
    found = torch.cat(norms).double()
    return found.dot(found)


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied by so that it does not exceed ``limit``; 0 means no limit."""
    return 1.0 if limit == 0 or norm <= limit else limit / norm
