"""Nobody: one rank of a group by itself, whose collectives move nothing and are over at once.

What would come from others has no values. Floating-point tensors are not asked for theirs, where all of them only stand
in for some. What has values, such as how many rows each rank has for an expert, is taken to be on all ranks as on this
one; what another rank alone would :data:`Tell` (the form of what its stage hands over) somebody else must know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.comm.backends import Reduction, Work
from shoal.storage import stands_in

Tell = Callable[[Tensor], None]
"""Is given whole numbers: those that are sent, or those to fill in for what would be received."""


class _Over:
    def wait(self) -> None:
        pass


_OVER = _Over()


class Counting:
    """A group with nobody else in it; ``sent`` is shown the whole numbers that leave, ``wanted`` fills in those that
    would come."""

    def __init__(self, sent: Tell, wanted: Tell) -> None:
        self._sent, self._wanted = sent, wanted

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Work:
        return _OVER

    def all_gather(self, parts: Sequence[Tensor], own: Tensor | None = None) -> Work:
        if own is not None and not stands_in(own):
            for part in parts:
                part.copy_(own.view(-1))
        return _OVER

    def reduce_scatter(self, out: Tensor, parts: Sequence[Tensor]) -> Work:
        return _OVER

    def exchange(self, into: Tensor, taken: Sequence[int], out: Tensor, given: Sequence[int]) -> Work:
        return _OVER

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return _OVER

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction = "sum") -> Work:
        return _OVER

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        if not tensor.is_floating_point():
            self._sent(tensor)
        return _OVER

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        if not tensor.is_floating_point():
            self._wanted(tensor)
        return _OVER

    def barrier(self) -> Work:
        return _OVER

    def close(self) -> None:
        pass
