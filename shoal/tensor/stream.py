"""The residual stream between divided linears, and how activations enter and leave the work that ranks share.

What enters a column-parallel linear is the whole of it on every rank; what a row-parallel linear gives is one term of a
sum on each. Between them the stream is either repeated on all ranks (Shoeybi et al. 2019) or divided by positions, each
rank keeping ⌈T/P⌉ of them (sequence parallelism, Korthikanti et al. 2022). Backward, gradients leave where activations
entered and enter where they left.

Axes in names: B samples, T positions, S this rank's positions, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.comm.differentiable import (
    Arriving,
    divided_total,
    here,
    pad,
    part_size,
    start_divided_sum,
    start_gather,
    start_sum,
    total,
)
from shoal.comm.world import Group
from shoal.model.loss import IGNORED

PURPOSE = "tensor"


@dataclass
class FullSizes:
    """Sizes of the whole that a rank's parts do not tell."""

    vocabulary: int = 0
    positions: int = 0
    """Of the micro-batch under way: those between whose forward and backward passes others run have as many."""


class Stream(Protocol):
    """One way to keep the residual stream on the ranks of ``group``."""

    @property
    def group(self) -> Group: ...

    @property
    def parts(self) -> int:
        """In how many parts the positions lie on different ranks."""

    def positions(self, x_BSH: Tensor) -> int:
        """T, of this rank's stream."""

    def start_enter(self, x_BSH: Tensor, positions: int) -> Arriving:
        """Begin to fetch the whole stream [B, T, H] of this rank's."""

    def start_leave(self, term_BTH: Tensor) -> Arriving:
        """Begin to sum the ranks' terms (contiguous, and given up) into this rank's stream [B, S, H]."""

    def leave(self, term_BTH: Tensor) -> Tensor:
        """The same to its end, with a gradient."""

    def by_part(self, labels_BT: Tensor) -> Tensor:
        """Labels [parts, B·S] as the streams of the parts lie, ``IGNORED`` where they are padded."""


@dataclass(frozen=True)
class Repeated:
    """Every rank has all positions: S = T."""

    group: Group
    parts = 1

    def positions(self, x_BSH: Tensor) -> int:
        return x_BSH.shape[1]

    def start_enter(self, x_BSH: Tensor, positions: int) -> Arriving:
        return here(x_BSH)

    def start_leave(self, term_BTH: Tensor) -> Arriving:
        return start_sum(term_BTH, self.group, PURPOSE)

    def leave(self, term_BTH: Tensor) -> Tensor:
        return total(term_BTH, self.group, PURPOSE)

    def by_part(self, labels_BT: Tensor) -> Tensor:
        return labels_BT.reshape(1, -1)


@dataclass(frozen=True)
class Divided:
    """Every rank has S = ⌈T/P⌉ positions, the last ones padded. What the padding holds reaches no other position, and
    its gradient is zero."""

    group: Group
    sizes: FullSizes

    @property
    def parts(self) -> int:
        return self.group.size

    def positions(self, x_BSH: Tensor) -> int:
        found = self.sizes.positions
        assert part_size(found, self.parts) == x_BSH.shape[1], f"{x_BSH.shape[1]} of {found} positions: not localised"
        return found

    def start_enter(self, x_BSH: Tensor, positions: int) -> Arriving:
        return start_gather(x_BSH, 1, positions, self.group, PURPOSE)

    def start_leave(self, term_BTH: Tensor) -> Arriving:
        return start_divided_sum(term_BTH, 1, self.group, PURPOSE)

    def leave(self, term_BTH: Tensor) -> Tensor:
        return divided_total(term_BTH, 1, self.group, PURPOSE)

    def by_part(self, labels_BT: Tensor) -> Tensor:
        size = part_size(labels_BT.shape[1], self.parts)
        padded = pad(labels_BT, 1, size * self.parts, IGNORED)
        parts: Tensor = padded.unflatten(1, (self.parts, size))
        return parts.transpose(0, 1).reshape(self.parts, -1)
