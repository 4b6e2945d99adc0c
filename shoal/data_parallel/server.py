"""Replicas agree by parameter servers (Dean et al. 2012, Li et al. 2014).

The ranks of the first replicas serve: each has an equal part of every bucket, of which it alone keeps optimizer states
and updates parameters. All ranks work. A bucket is pushed to its servers once it is complete, while the backward pass
goes on; the new parameters come back under the next forward pass, those that are used first first. Of Ψ parameters over
W ranks and N servers, a rank that does not serve sends Ψ and receives Ψ; a server receives (W−1)·Ψ/N and (N−1)/N·Ψ.

Where steps may run ahead of updates (Ho et al. 2013), what is pushed and what is handed out are copies, so that neither
has to have arrived before the next step writes to where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from shoal.comm.backends import Reduction
from shoal.comm.collectives import Pending
from shoal.comm.star import start_pull, start_push
from shoal.data_parallel.sharing import Sharing
from shoal.data_parallel.sync import Sync
from shoal.local import LocalParameter
from shoal.mesh import Mesh
from shoal.optim.treatment import Treat


class _Push(NamedTuple):
    """The gradients of bucket ``number`` on their way to its servers; ``own`` becomes this rank's part of the sums."""

    number: int
    own: Tensor
    pending: list[Pending]


class Server(Sync):
    """Pushes gradients, which are joined by ``reduction``, and pulls parameters. ``uses`` names the parameters of each
    unit: its own, and those that it shares.

    With ``stale`` as many steps may be pushed that :meth:`finish` has not been called for when the next one begins. It
    then finishes the oldest. ``factor`` is what gradients are multiplied by before they leave, where it is set.
    """

    def __init__(
        self,
        trained: Sequence[LocalParameter],
        frozen: Sequence[LocalParameter],
        treat: Treat,
        mesh: Mesh,
        sharing: Sharing,
        *,
        uses: Mapping[int, Sequence[str]],
        reduction: Reduction = "sum",
        stale: int = 0,
    ) -> None:
        super().__init__(trained, frozen, treat, mesh, sharing)
        self._reduction, self._stale = reduction, stale
        self.factor: Tensor | None = None
        number_of = {slot.held.name: n for n, flat in enumerate(self.flats) for slot in flat.bucket.slots}
        self._needs = {
            unit: sorted({number_of[name] for name in names if name in number_of}) for unit, names in uses.items()
        }
        self._pushed: deque[list[_Push]] = deque()
        """By step, those that have not been finished."""
        self._coming: dict[int, list[Pending]] = {}
        """By bucket: the parts that other ranks have updated."""
        self._going: deque[list[Pending]] = deque()
        """By update: the parts that this rank has."""

    # ---- gradients

    def begin(self) -> None:
        while len(self._pushed) > self._stale:  # of a step that was cut short
            for push in self._pushed.popleft():
                _wait(push.pending)
        super().begin()
        self._pushed.append([])

    def _send(self, number: int) -> None:
        flat = self.flats[number]
        grads = flat.grads
        if self._stale:
            grads = grads.clone() if self.factor is None else grads * self.factor.to(grads.dtype)
        pending = [
            start_push(part, self._shards[number], "gradients", place, self._reduction)
            for place, part in self._parts(number, grads)
        ]
        self._pushed[-1].append(_Push(number, grads[flat.bucket.low : flat.bucket.high], pending))

    def _parts(self, number: int, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Of something that lies as a bucket does: each server's place in the group, and its part."""
        bucket, group = self.flats[number].bucket, self._shards[number]
        if bucket.size and group.size > 1:
            for owner, part in zip(bucket.owners, whole.tensor_split(len(bucket.owners)), strict=True):
                yield group.ranks.index(owner), part

    def finish(self) -> None:
        pushed = self._pushed.popleft()
        for number, own, pending in pushed:
            _wait(pending)
            if self._stale:
                self.flats[number].own_grads = own
            if not self._crosses[number]:
                self._add_squares(number)  # now, while they are in the cache
        crossing = sorted((one.number for one in pushed if self._crosses[one.number]), key=self._by_name)
        for number, under_way in [(number, self._start_cross(number)) for number in crossing]:
            _wait(under_way)
            self._add_squares(number)
        while len(self._going) > self._stale:
            _wait(self._going.popleft())  # before the next update writes to it

    # ---- parameters

    def published(self, *, fresh: bool = False) -> None:
        super().published(fresh=fresh)
        self._arrive(list(self._coming))
        going = []
        for number in reversed(range(len(self.flats))):
            flat, group = self.flats[number], self._shards[number]
            coming = []
            for place, part in self._parts(number, flat.params):
                if place != group.index:
                    coming.append(start_pull(part, group, "parameters", place))
                else:
                    part = part.clone() if self._stale else part
                    going.append(start_pull(part, group, "parameters", place))
            if coming:
                flat.see()  # writes from here on are in the way
                self._coming[number] = coming
        self._going.append(going)

    def enter_unit(self, unit: int, backward: bool) -> None:
        self._arrive([number for number in self._needs[unit] if number in self._coming])

    def _arrive(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            flat = self.flats[number]
            flat.check_unwritten()
            _wait(self._coming.pop(number))
            flat.see()

    def settle(self) -> None:
        self._arrive(list(self._coming))
        while self._going:
            _wait(self._going.popleft())

    def check(self, *, under_way: bool = False) -> None:
        super().check(under_way=under_way or bool(self._coming))


def _wait(pending: Sequence[Pending]) -> None:
    for one in pending:
        one.wait()
