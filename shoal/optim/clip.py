"""The exact norm of all gradients, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator
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
    norms = torch.cat([norm for x in tensors for norm in _row_norms(x)]).double()
    return norms.dot(norms)


def _row_norms(x: Tensor) -> Iterator[Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.ndim > 1 and 0 < x.shape[-1] <= _ROW:
        yield torch.linalg.vector_norm(x, dim=-1, dtype=wide).flatten()
        return
    flat = x.reshape(-1)
    even = len(flat) // _ROW * _ROW
    yield torch.linalg.vector_norm(flat[:even].view(-1, _ROW), dim=1, dtype=wide)
    yield torch.linalg.vector_norm(flat[even:], dtype=wide).view(1)


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied by so that it does not exceed ``limit``; 0 means no limit."""
    return 1.0 if limit == 0 or norm <= limit else limit / norm
