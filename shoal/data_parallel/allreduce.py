"""Replicas agree by all-reduce (as in DDP): gradients are summed in buckets while the backward pass still runs.

Every gradient enters through :meth:`AllReduce.add`. A bucket is sent once the Program's last backward pass has
completed all of its units, and always in the same order on all ranks, so a parameter that no sample of this rank
used cannot make ranks disagree about which collective is next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collectives import Pending, start_all_reduce
from shoal.comm.world import Group
from shoal.data_parallel.buckets import Bucket
from shoal.local import LocalParameter


@dataclass(frozen=True)
class Main:
    """The main gradient of one parameter: a view of the buffer of bucket number ``bucket``."""

    held: LocalParameter
    gradient: Tensor
    bucket: int

    @property
    def settled(self) -> bool:
        """Whether the parameter has no gradient outside the buffer."""
        grad = self.held.parameter.grad
        return grad is None or grad is self.gradient


class AllReduce:
    """Sums the main gradients of ``buckets`` over the ranks that hold the same parameters.

    ``summed(bucket)`` is called as soon as a bucket holds the sums of the step, while others may still be under way.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: Callable[[tuple[int, ...]], Group],
        summed: Callable[[Bucket], None],
    ) -> None:
        self._buckets, self._summed = buckets, summed
        self._ranges = [
            [(bucket.grads[start:stop], group(holders.summing)) for start, stop, holders in bucket.ranges]
            for bucket in buckets
        ]
        self._mains = [
            Main(slot.held, bucket.grad(slot), number) for number, bucket in enumerate(buckets) for slot in bucket.slots
        ]
        self._of_unit: dict[int, list[Main]] = defaultdict(list)
        self._of_bucket: dict[int, list[Main]] = defaultdict(list)
        for main in self._mains:
            self._of_unit[main.held.unit].append(main)
            self._of_bucket[main.bucket].append(main)
        self._entered: set[str] = set()
        self._units_done: set[int] = set()
        self._sent = 0
        self._pending: list[tuple[Bucket, list[Pending]]] = []

    def begin(self) -> None:
        """Start a step: nothing has entered, whatever a step that failed half-way has left."""
        for pending in (one for _, under_way in self._pending for one in under_way):
            pending.wait()
        self._pending.clear()
        self._entered.clear()
        self._units_done.clear()
        self._sent = 0
        for main in self._mains:
            main.held.parameter.grad = None

    def unit_done(self, unit: int, final: bool) -> None:
        """A backward pass has completed the gradients of ``unit``: take them in. If no pass will follow (``final``),
        send each bucket whose units all are complete."""
        fresh = [main for main in self._of_unit[unit] if not main.settled]
        self.add(fresh, [main.held.parameter.grad for main in fresh])  # type: ignore[misc]
        for main in self._of_unit[unit]:
            if final:  # what still came would lie outside the buffer, where `reduce` finds it
                main.held.parameter.grad = None
            elif main.held.name in self._entered:
                # Autograd adds the next micro-batch's gradient in place, while it is in the cache.
                main.held.parameter.grad = main.gradient
        if final:
            self._units_done.add(unit)
            while self._sent < len(self._buckets) and self._buckets[self._sent].units <= self._units_done:
                self._send()

    def add(self, mains: Sequence[Main], gradients: Sequence[Tensor]) -> None:
        """The one way in: add contributions to main gradients. The first of a step overwrites what the last left."""
        first: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for main, gradient in zip(mains, gradients, strict=True):
            assert main.bucket >= self._sent, f"a gradient of {main.held.name} came after its bucket was sent"
            into, what = later if main.held.name in self._entered else first
            into.append(main.gradient)
            what.append(gradient)
            self._entered.add(main.held.name)
        if first[0]:
            torch._foreach_copy_(*first)
        if later[0]:
            torch._foreach_add_(*later)

    def reduce(self) -> None:
        """Every gradient of the step has entered: send what has not been sent."""
        for main in self._mains:
            assert main.settled, f"a gradient of {main.held.name} came after its unit was done"
        while self._sent < len(self._buckets):
            self._send()

    def finish(self) -> None:
        """Wait until all main gradients are sums over all replicas."""
        for bucket, under_way in self._pending:
            for pending in under_way:
                pending.wait()
            self._summed(bucket)
        self._pending.clear()

    def _send(self) -> None:
        for main in self._of_bucket[self._sent]:
            if main.held.name not in self._entered:  # no sample of this rank used it
                main.gradient.zero_()
        bucket, ranges = self._buckets[self._sent], self._ranges[self._sent]
        if all(group.size == 1 for _, group in ranges):
            self._summed(bucket)  # now, while it is in the cache
        else:
            self._pending.append((bucket, [start_all_reduce(*each, "gradients") for each in ranges]))
        self._sent += 1
