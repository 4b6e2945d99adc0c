"""ZeRO (Rajbhandari et al. 2020): replicas divide what they would all keep.

Of Ψ parameters over N ranks, each rank updates Ψ/N and keeps the optimizer states of those (stage 1); of gradients it
keeps only those once they are reduced (stage 2); of parameters too (stage 3), which are gathered a unit at a time for
as long as it is used. Stages 1 and 2 receive 2(N−1)/N·Ψ words a step, however many micro-batches add up before they are
sent. Stage 3 gathers for each pass and sends after each backward pass: at most 3(N−1)/N·Ψ words a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm import quantised
from shoal.comm.collectives import Pending, start_reduce_scatter
from shoal.comm.world import Group
from shoal.data_parallel.entry import Main
from shoal.data_parallel.faces import Faces
from shoal.data_parallel.flat import close, is_open, open_
from shoal.data_parallel.sharing import Sharing
from shoal.data_parallel.sync import Sync
from shoal.local import LocalParameter
from shoal.mesh import Mesh
from shoal.meter import mark
from shoal.optim.treatment import Treat
from shoal.purposes import COMMUNICATION

IN_FLIGHT = 2
"""Buckets that may be under way at once: sending another waits for the oldest."""


class _Scatter(NamedTuple):
    """A bucket that is being reduced; ``more`` is what has to be added to what earlier passes left in the part, and
    ``adds`` says that those have been taken to the host."""

    pending: Pending
    more: Tensor | None
    last: bool
    adds: bool


class Zero(Sync):
    """Stages 1 and 2: gradients are reduce-scattered, and the updated parameters gathered.

    The buckets of the first units are updated first, and each is gathered while the next is updated, the pass after it
    too: a unit waits for its own. Until then its parameters are NaN, unless :meth:`settle` has waited for all.
    """

    def set_up(self) -> None:
        self._scattering: dict[int, _Scatter] = {}
        self._begun: set[int] = set()
        """Buckets whose part has sums of this step."""
        self._sunk: list[int] = []
        """Buckets whose sums the host alone has, and whose squares are still to be added."""
        self._crossing: list[tuple[int, list[Pending]]] | None = None
        self._gathering: dict[int, Pending] = {}
        self._faces = [Faces(flat) for flat in (*self.flats, *self.frozen_flats)]
        if self._sharing.int8_gather and self._sharing.keep_params:  # the first pass computes as the others do
            Zero.published(self)
            Zero.settle(self)

    def begin(self) -> None:
        self._settle(0)
        self._begun.clear()
        self._sunk.clear()
        self._crossing = None
        super().begin()

    def _send(self, number: int, *, last: bool = True) -> None:
        flat = self.flats[number]
        if not is_open(flat.own_grads):
            open_(flat.own_grads)
        before, on_host = number in self._begun, flat.stowage.grads and not self._crosses[number]
        more = torch.empty_like(flat.own_grads) if before and not on_host else None
        self._begun.add(number)
        if more is not None:
            mark(COMMUNICATION, more)
        into = flat.own_grads if more is None else more
        start = quantised.start_reduce_scatter if self._rounds(flat.grads) else start_reduce_scatter
        pending = start(into, flat.grads, self._shards[number], "gradients")
        self._scattering[number] = _Scatter(pending, more, last, before and on_host)
        self._settle(IN_FLIGHT)

    def _settle(self, most: int) -> None:
        """Wait until at most ``most`` buckets are being scattered, oldest first."""
        while len(self._scattering) > most:
            number = next(iter(self._scattering))
            scatter, flat = self._scattering.pop(number), self.flats[number]
            scatter.pending.wait()
            if scatter.more is not None:
                flat.own_grads += scatter.more
            if not flat.keep_grads and flat.divided:
                close(flat.grads)
            if self._crosses[number]:
                continue
            if scatter.last and not scatter.adds:
                self._add_squares(number)  # now, while they are in the cache
            if scatter.last or flat.stowage.grads:
                flat.lower_gradients(add=scatter.adds)
            if scatter.last and scatter.adds:
                self._sunk.append(number)

    def depart(self) -> None:
        if self._crossing is None:
            crossing = sorted((number for number, crosses in enumerate(self._crosses) if crosses), key=self._by_name)
            if crossing:
                self._settle(0)
            self._crossing = [(number, self._start_cross(number)) for number in crossing]

    def turn(self) -> None:
        super().turn()
        self._begun.clear()

    def finish(self) -> None:
        self.depart()
        self._settle(0)
        for number, under_way in self._crossing or ():
            for pending in under_way:
                pending.wait()
            self._add_squares(number)
            self.flats[number].lower_gradients()
        for number in self._sunk:
            self._add_squares(number)
        self._sunk.clear()
        self._crossing = None

    @property
    def _turns(self) -> Sequence[int]:
        return [0] * len(self.flats) if self.must_see else range(len(self.flats))[::-1]

    def publish(self, turn: int) -> None:
        if not (self.must_see or self.flats[number := self._turns[turn]].stowage.shelves):
            self._gather(number)

    def published(self, *, fresh: bool = False) -> None:
        if self.must_see:  # they are gathered when they are used
            super().published(fresh=fresh)
            return
        for number in self._turns:
            if number not in self._gathering:
                self._gather(number, fresh=fresh)

    def _gather(self, number: int, *, fresh: bool = False) -> None:
        """This rank's part of a bucket has new values."""
        flat = self.flats[number]
        self._arrive(number)
        flat.publish(fresh=fresh)
        self._faces[number].hide()
        self._gathering[number] = self._start_gather(flat.params, flat.own_params, self._shards[number])

    def _start_gather(self, whole: Tensor, own: Tensor, group: Group) -> Pending:
        if self._sharing.int8_gather and whole.is_floating_point():
            return quantised.start_all_gather(whole, own, group, "parameters")
        return super()._start_gather(whole, own, group)

    def _rounds(self, gradients: Tensor) -> bool:
        return self._sharing.int8_reduce and gradients.is_floating_point()

    def _start_cross(self, number: int) -> list[Pending]:
        """Those of other groups of ``zero=S/G`` too, and of whoever holds what here is divided."""
        own = self.flats[number].own_grads
        if self.flats[number].bucket.spans_stages or not self._rounds(own):
            return super()._start_cross(number)
        return [quantised.start_all_reduce(own[part], group, "gradients") for part, group in self._crosses[number]]

    def settle(self) -> None:
        for number in list(self._gathering):
            self._arrive(number)

    def enter_unit(self, unit: int, backward: bool) -> None:
        if self._gathering:
            for number in sorted({main.bucket for main in self._used_by[unit]}, reverse=True):
                self._arrive(number)
        super().enter_unit(unit, backward)

    def _arrive(self, number: int) -> None:
        """Wait for what is gathered of a bucket."""
        if (pending := self._gathering.pop(number, None)) is not None:
            pending.wait()
            self._faces[number].show_whole()
            self.flats[number].see()

    def check(self, *, under_way: bool = False) -> None:
        for number in self._gathering:
            self._faces[number].show_whole()  # nobody reads them before they have arrived
        super().check(under_way=under_way)


class ZeroThree(Zero):
    """Stage 3: parameters are whole from a unit's first use to its last (see
    :class:`~shoal.data_parallel.visits.Visits` for ``uses`` and ``resident``). Unless they are ``resident``, gradients
    are sent after every pass; else they add up before."""

    def __init__(
        self,
        trained: Sequence[LocalParameter],
        frozen: Sequence[LocalParameter],
        treat: Treat,
        mesh: Mesh,
        sharing: Sharing,
        *,
        uses: Mapping[int, Sequence[str]],
        resident: bool,
    ) -> None:
        super().__init__(trained, frozen, treat, mesh, sharing)
        self._resident = resident
        self.come_and_go(uses, resident=resident)

    def make_ready(self, main: Main) -> None:
        while main.bucket in self._scattering:  # what an earlier micro-batch left there is still being read
            self._settle(len(self._scattering) - 1)
        super().make_ready(main)

    def _between_passes(self, unit: int) -> None:
        super()._between_passes(unit)
        if self._resident:
            return
        for number in dict.fromkeys(main.bucket for main in self._of_unit[unit]):
            flat = self.flats[number]
            if flat.keep_grads or (not flat.divided and self._crosses[number]):  # nobody to divide it with
                continue
            self._fill_up(number)
            self._send(number, last=False)
            for main in self._of_bucket[number]:
                main.entered, main.held.parameter.grad = False, None
