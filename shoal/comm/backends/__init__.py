"""What carries out the collectives of a group of ranks: NCCL, gloo, or memory that processes of one machine share.

All have one form (:class:`Backend`), so that what is above them does not ask which it is. Sizes, words and whatever
else is the same for all is for :mod:`shoal.comm.collectives` to see to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

Reduction = Literal["sum", "max", "min"]
JOIN: dict[Reduction, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
"""Joins two terms of each."""


class Work(Protocol):
    """What is under way. Nobody may write to what it reads or touch what it writes until :meth:`wait` has returned;
    it may be called again."""

    def wait(self) -> object: ...


class Backend(Protocol):
    """A group of ranks, which are counted by their places in it. All take part in each collective, and start those of
    one group in one order. Tensors are contiguous."""

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Work:
        """Reduce in place."""

    def all_gather(self, parts: Sequence[Tensor], own: Tensor | None = None) -> Work:
        """Fill the parts, which follow one another in one flat tensor, each from its rank. A rank's own is there, and
        in ``own`` too, if that is given: others may read it from either."""

    def reduce_scatter(self, out: Tensor, parts: Sequence[Tensor]) -> Work:
        """Sum each of the parts, which follow one another in one flat tensor, for its rank, in a flat ``out`` that may
        be its own part. The terms of a part are always added up in one order."""

    def exchange(self, into: Tensor, taken: Sequence[int], out: Tensor, given: Sequence[int]) -> Work:
        """Send ``given[i]`` elements of the flat ``out`` to rank i, and receive ``taken[i]`` of ``into`` from it."""

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Copy that of rank ``source`` to all."""

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction = "sum") -> Work:
        """Reduce into that of rank ``root``, the terms always in one order. Those of others may then hold anything."""

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        """To one rank, which receives messages of one tag in the order in which they are sent."""

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        """From one rank."""

    def barrier(self) -> Work:
        """Ends when all ranks have started it."""

    def close(self) -> None:
        """Let go of whatever the group has to itself."""
