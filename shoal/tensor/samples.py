"""Which samples of a micro-batch, and which of their positions, are a rank's, where tensor parallelism divides them.

B samples are divided in order into parts of one size, the last ones padded with the last sample again. A sample that
pads counts in no loss, so its gradient is zero, and stays so in products with what are numbers: those of a sample that
is trained on are, those of zeros or of a token that never occurs need not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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

    def of(self, x: Tensor, padding: float | None = None) -> Tensor:
        """This part of ``x`` [B, …]; what pads it is its last sample, or ``padding``."""
        if self.parts == self.multiple == 1:
            return x
        size = part_size(len(x), self.parts * self.multiple) * self.multiple
        part = x[self.at * size : (self.at + 1) * size]
        if len(part) == size:
            return part
        last = x[-1:] if padding is None else torch.full_like(x[-1:], padding)
        return torch.cat([part, last.expand(size - len(part), *x.shape[1:])])

    def of_each(self, x: Tensor) -> Tensor:
        """This part of ``x`` [B or 1, …], which is all of it where it serves every sample."""
        return x if len(x) == 1 else self.of(x)
