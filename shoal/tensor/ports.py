"""How the tensors of a divided linear map are put together before its product, and divided after it.

Y = X·Wᵀ on a grid of ranks reads one rank's blocks of X and W and writes its block of Y. Whatever the grid, what moves
is of one form. Before the product X and W may *enter*: they are gathered from the ranks that have their other parts.
After it Y may *leave*: every rank has one term of a sum, and keeps a part of it. Backward each does the opposite: the
gradient of Y enters, those of X and W leave. A port is one way for one tensor to enter and leave; a kind of tensor
parallelism is a choice of three:

========================  =================  ============  ==================
                          X                  W             Y
========================  =================  ============  ==================
1-D, a block's first      repeated           –             –
1-D, its second           –                  –             repeated
1-D, sequence parallel    positions          –             positions
2-D                       features           in-features   –
3-D, first                positions          in-features   samples
3-D, second               samples            in-features   positions
========================  =================  ============  ==================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import broadcast
from shoal.comm.differentiable import (
    Arriving,
    here,
    pad,
    part_size,
    start_divided_sum,
    start_gather,
    start_join,
    start_shared_sum,
    start_sum,
)
from shoal.comm.world import Group
from shoal.layout.kinds import split_evenly

PURPOSE = "tensor"


class Port(Protocol):
    """One way for a tensor to be put together from the ranks' parts, and for their terms to be added and divided."""

    @property
    def dim(self) -> int:
        """The dim that is divided."""

    @property
    def parts(self) -> int:
        """In how many parts it is."""

    @property
    def sums(self) -> bool:
        """Whether ranks have terms of a sum."""

    def own(self, whole: Tensor, padding: float) -> Tensor:
        """This rank's part of a ``whole`` that it has, what is too much of it being ``padding``."""

    def full(self, part: Tensor) -> int:
        """How long the whole is, along the dim that is divided."""

    def start_enter(self, part: Tensor, length: int) -> Arriving[Tensor]:
        """Begin to fetch the whole, ``length`` elements long, of this rank's ``part``."""

    def start_leave(self, term: Tensor) -> Arriving[Tensor]:
        """Begin to add up the ranks' terms (contiguous, and given up) into this rank's part."""


@dataclass(frozen=True)
class Ports:
    """Those of a linear map's input [..., in], weight [out, in] and output [..., out]."""

    x: Port
    weight: Port
    y: Port


@dataclass(frozen=True)
class Still:
    """Nothing moves: this rank's part is all it needs, its term all there is."""

    dim = 0
    parts = 1
    sums = False

    def own(self, whole: Tensor, padding: float) -> Tensor:
        return whole

    def full(self, part: Tensor) -> int:
        return part.shape[0]

    def start_enter(self, part: Tensor, length: int) -> Arriving[Tensor]:
        return here(part)

    def start_leave(self, term: Tensor) -> Arriving[Tensor]:
        return here(term)


@dataclass(frozen=True)
class Repeated(Still):
    """Every rank of ``group`` has, and keeps, the whole."""

    group: Group
    sums = True

    def start_leave(self, term: Tensor) -> Arriving[Tensor]:
        return start_sum(term, self.group, PURPOSE)


@dataclass(frozen=True)
class Even:
    """Divided along ``dim`` into as many parts of one length as ``group`` has ranks."""

    group: Group
    dim: int
    sums = True

    @property
    def parts(self) -> int:
        return self.group.size

    def own(self, whole: Tensor, padding: float) -> Tensor:
        size = part_size(whole.shape[self.dim], self.group.size)
        padded = pad(whole, self.dim, size * self.group.size, padding)
        return padded.narrow(self.dim, size * self.group.index, size)

    def full(self, part: Tensor) -> int:
        return part.shape[self.dim] * self.group.size

    def start_enter(self, part: Tensor, length: int) -> Arriving[Tensor]:
        return start_gather(part, self.dim, length, self.group, PURPOSE)

    def start_leave(self, term: Tensor) -> Arriving[Tensor]:
        return start_divided_sum(term, self.dim, self.group, PURPOSE)


@dataclass
class Extent:
    """What of the micro-batch whose layer is about to run a rank's part does not tell: how many positions and samples
    it has, and whether logits of the newest position alone are wanted."""

    positions: int = 0
    samples: int = 0
    newest: bool = False


@dataclass(frozen=True)
class Positions(Even):
    """Activations [B, T, …] with ⌈T/P⌉ positions on each rank, the last ones padded (sequence parallelism, Korthikanti
    et al. 2022). What the padding holds reaches no other position, and its gradient is zero."""

    dim: int = 1
    extent: Extent = field(default_factory=Extent)

    def full(self, part: Tensor) -> int:
        found = self.extent.positions
        assert part_size(found, self.group.size) == part.shape[1], f"{part.shape[1]} of {found} positions"
        return found

    def newest(self, position: Tensor) -> Tensor:
        """The newest position [B, 1, …], which is this rank's ``position`` if it has it. Without a gradient."""
        found, length = position.clone(memory_format=torch.contiguous_format), self.extent.positions
        broadcast(found, self.group, PURPOSE, (length - 1) // part_size(length, self.group.size))
        return found


@dataclass(frozen=True)
class Shares:
    """Divided along ``dim`` into parts of the lengths ``sizes``, which ranks know."""

    group: Group
    dim: int
    sizes: tuple[int, ...]
    sums = True

    @property
    def parts(self) -> int:
        return self.group.size

    def own(self, whole: Tensor, padding: float) -> Tensor:
        return whole.narrow(self.dim, sum(self.sizes[: self.group.index]), self.sizes[self.group.index])

    def full(self, part: Tensor) -> int:
        return sum(self.sizes)

    def start_enter(self, part: Tensor, length: int) -> Arriving[Tensor]:
        return start_join(part, self.dim, self.sizes, self.group, PURPOSE)

    def start_leave(self, term: Tensor) -> Arriving[Tensor]:
        return start_shared_sum(term, self.dim, self.sizes, self.group, PURPOSE)


def even(group: Group, dim: int) -> Port:
    """Equal parts along ``dim``, if there are several."""
    return Even(group, dim) if group.size > 1 else Still()


def shares(group: Group, dim: int, total: int) -> Port:
    """``total`` elements along ``dim`` in parts that differ by at most one, if there are several."""
    if total % group.size == 0:
        return even(group, dim)
    return Shares(group, dim, split_evenly(total, group.size))


def entered(part: Tensor, port: Port) -> Tensor:
    """The whole, of this rank's part of it. Backward, the gradient leaves."""
    whole: Tensor = _Enter.apply(part, port)  # type: ignore[no-untyped-call]
    return whole


def left(term: Tensor, port: Port) -> Tensor:
    """This rank's part of the sum of terms (contiguous, and given up). Backward, the gradient enters."""
    part: Tensor = _Leave.apply(term, port)  # type: ignore[no-untyped-call]
    return part


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, port: Port) -> Tensor:
        ctx.port = port
        return port.start_enter(part, port.full(part)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.port.start_leave(grad.contiguous()).wait(), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, port: Port) -> Tensor:
        ctx.port, ctx.length = port, term.shape[port.dim]
        part = port.start_leave(term).wait()
        if part is term:
            ctx.mark_dirty(term)
        return part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.port.start_enter(grad, ctx.length).wait(), None


def by_part(labels_BT: Tensor, parts: int, padding: int) -> Tensor:
    """Labels [parts, B·⌈T/parts⌉] as those parts of the positions lie, ``padding`` where these are padded."""
    size = part_size(labels_BT.shape[1], parts)
    padded: Tensor = pad(labels_BT, 1, size * parts, padding).unflatten(1, (parts, size))
    return padded.transpose(0, 1).reshape(parts, -1)
