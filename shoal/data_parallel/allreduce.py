"""Replicas agree by all-reduce (as in DDP, Li et al. 2020): buckets are summed while the backward pass still runs."""

from __future__ import annotations

from shoal.comm.collectives import Pending
from shoal.data_parallel.sync import Sync

IN_FLIGHT = 2
"""Buckets that are being summed at once, where the device keeps none that has been."""


class AllReduce(Sync):
    """Every rank keeps all it holds, and has the sums of all of it."""

    def set_up(self) -> None:
        self._pending: list[tuple[int, list[Pending]]] = []
        self._departed = False

    def begin(self) -> None:
        for pending in (one for _, under_way in self._pending for one in under_way):
            pending.wait()
        self._pending.clear()
        self._departed = False
        super().begin()

    def _send(self, number: int) -> None:
        if self.flats[number].bucket.spans_stages:
            return  # the other stage may be far from having sent its own
        self._pending.append((number, self._start_cross(number)))
        if not self._pending[-1][1]:
            self._reduced(*self._pending.pop())  # now, while they are in the cache
        while self.flats[number].stowage.grads and len(self._pending) > IN_FLIGHT:
            self._reduced(*self._pending.pop(0))

    def depart(self) -> None:
        if not self._departed:
            shared = [number for number, flat in enumerate(self.flats) if flat.bucket.spans_stages]
            self._pending += [(number, self._start_cross(number)) for number in sorted(shared, key=self._by_name)]
        self._departed = True

    def finish(self) -> None:
        self.depart()
        self._departed = False
        while self._pending:
            self._reduced(*self._pending.pop(0))

    def _reduced(self, number: int, under_way: list[Pending]) -> None:
        for pending in under_way:
            pending.wait()
        self._add_squares(number)
        self.flats[number].lower_gradients()
