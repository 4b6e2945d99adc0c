"""Which samples of a micro-batch, and which of their positions, are a rank's, where tensor parallelism divides them.

B samples are divided in order into parts of one size, the last ones padded. A sample that pads counts in no loss, so
its gradient is zero; it only must not make numbers that are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from shoal.comm.differentiable import part_size
from shoal.mesh import Coords


@dataclass(frozen=True)
class Samples:
    """Part number ``at`` of ``parts`` parts of the samples, each of as many as ``multiple`` divides."""

    parts: int = 1
    at: int = 0
    multiple: int = 1

    @classmethod
    def over(cls, axes: Sequence[tuple[str, int]], coords: Coords, multiple: int = 1) -> Samples:
        """The part of the rank at ``coords``, where ``axes`` divide samples one after another."""
        parts, at = 1, 0
        for name, size in axes:
            parts, at = parts * size, at * size + coords[name]
        return cls(parts, at, multiple)

    def of(self, x: Tensor, padding: float = 0) -> Tensor:
        """This part of ``x`` [B, …]."""
        if self.parts == self.multiple == 1:
            return x
        size = part_size(len(x), self.parts * self.multiple) * self.multiple
        part = x[self.at * size : (self.at + 1) * size]
        return F.pad(part, (*(0, 0) * (x.ndim - 1), 0, size - len(part)), value=padding)

    def of_each(self, x: Tensor, padding: float = 0) -> Tensor:
        """This part of ``x`` [B or 1, …], which is all of it where it serves every sample."""
        return x if len(x) == 1 else self.of(x, padding)
