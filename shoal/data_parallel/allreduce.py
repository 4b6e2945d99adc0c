"""Replicas agree by all-reduce (as in DDP): gradients are summed in buckets while the backward pass still runs.

Every gradient enters through :meth:`AllReduce.add`. A bucket is sent once the Program's last backward pass has
completed all of its units, and always in the same order on all ranks, so a parameter that no sample of this rank
used cannot make ranks disagree about which collective is next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.comm.collectives import Pending, start_all_reduce
from shoal.comm.world import Group
from shoal.data_parallel.buckets import Bucket, Slot


class AllReduce:
    """Sums the main gradients of ``buckets`` over the ranks that hold the same parameters."""

    def __init__(self, buckets: Sequence[Bucket], group: Callable[[tuple[int, ...]], Group]) -> None:
        self._buckets = buckets
        self._ranges = [
            [(bucket.grads[start:stop], group(holders.sum)) for start, stop, holders in bucket.ranges()]
            for bucket in buckets
        ]
        self._entered: set[str] = set()
        self._units_done: set[int] = set()
        self._next = 0
        self._pending: list[Pending] = []

    def add(self, bucket: Bucket, slot: Slot, gradient: Tensor) -> None:
        """The one way in: add a contribution to a parameter's main gradient."""
        assert self._next == 0 or bucket not in self._buckets[: self._next], (
            f"a gradient of {slot.held.name} came after its bucket was reduced"
        )
        if slot.held.name in self._entered:
            bucket.grad(slot).add_(gradient)
        else:
            self._entered.add(slot.held.name)
            bucket.grad(slot).copy_(gradient)

    def unit_done(self, unit: int) -> None:
        """Units complete in the order of the backward pass; send each bucket whose units all have."""
        self._units_done.add(unit)
        while self._next < len(self._buckets) and self._buckets[self._next].units <= self._units_done:
            self._send()

    def reduce(self) -> None:
        """Every gradient of the step has entered: send what has not been sent."""
        while self._next < len(self._buckets):
            self._send()

    def finish(self) -> None:
        """Wait until all main gradients are sums over all replicas; the next step then starts afresh."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        self._entered.clear()
        self._units_done.clear()
        self._next = 0

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        for slot in bucket.slots:
            if slot.held.name not in self._entered:  # no sample of this rank used it
                bucket.grad(slot).zero_()
        self._pending += [
            start_all_reduce(gradients, group, "gradients") for gradients, group in self._ranges[self._next]
        ]
        self._next += 1
