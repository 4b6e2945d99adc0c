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
from shoal.comm.collectives import Pending, start_all_gather, start_reduce_scatter
from shoal.comm.world import Group
from shoal.data_parallel.entry import Main
from shoal.data_parallel.faces import Faces
from shoal.data_parallel.flat import Flat, close, is_open, open_
from shoal.data_parallel.sharing import Sharing
from shoal.data_parallel.sync import Sync
from shoal.local import LocalParameter
from shoal.mesh import Mesh
from shoal.optim.treatment import Treat

IN_FLIGHT = 2
"""Buckets that may be under way at once: sending another waits for the oldest."""


class _Scatter(NamedTuple):
    """A bucket that is being reduced; ``more`` is what has to be added to what earlier passes left in the part."""

    pending: Pending
    more: Tensor | None
    last: bool


class Zero(Sync):
    """Stages 1 and 2: gradients are reduce-scattered, and the updated parameters gathered.

    The buckets of the first units are updated first, and each is gathered while the next is updated, the pass after it
    too: a unit waits for its own. Until then its parameters are NaN, unless :meth:`settle` has waited for all.
    """

    def set_up(self) -> None:
        self._scattering: dict[int, _Scatter] = {}
        self._begun: set[int] = set()
        """Buckets whose part has sums of this step."""
        self._crossing: list[tuple[int, list[Pending]]] | None = None
        self._gathering: dict[int, Pending] = {}
        self._faces = [Faces(flat) for flat in (*self.flats, *self.frozen_flats)]
        if self._sharing.int8_gather and self._sharing.keep_params:  # the first pass computes as the others do
            Zero.published(self)
            Zero.settle(self)

    def begin(self) -> None:
        self._settle(0)
        self._begun.clear()
        self._crossing = None
        super().begin()

    def _send(self, number: int, *, last: bool = True) -> None:
        flat = self.flats[number]
        more = torch.empty_like(flat.own_grads) if number in self._begun else None
        self._begun.add(number)
        into = flat.own_grads if more is None else more
        start = quantised.start_reduce_scatter if self._rounds(flat.grads) else start_reduce_scatter
        pending = start(into, flat.grads, self._shards[number], "gradients")
        self._scattering[number] = _Scatter(pending, more, last)
        self._settle(IN_FLIGHT)

    def _settle(self, most: int) -> None:
        """Wait until at most ``most`` buckets are being scattered, oldest first."""
        while len(self._scattering) > most:
            number = next(iter(self._scattering))
            scatter, flat = self._scattering.pop(number), self.flats[number]
            scatter.pending.wait()
            if scatter.more is not None:
                flat.own_grads += scatter.more
            if not flat.keep_grads:
                close(flat.grads)
            if scatter.last and not self._crosses[number]:
                self._add_squares(number)  # now, while they are in the cache

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
        self._crossing = None

    @property
    def _turns(self) -> Sequence[int]:
        return range(len(self.flats))[::-1]

    def publish(self, turn: int) -> None:
        number = self._turns[turn]
        self._arrive(number)
        self.flats[number].publish()
        self._faces[number].hide()
        self._gathering[number] = self._start_gather(self.flats[number], self._shards[number])

    def _start_gather(self, flat: Flat, group: Group) -> Pending:
        rounds = self._sharing.int8_gather and flat.params.is_floating_point()
        start = quantised.start_all_gather if rounds else start_all_gather
        return start(flat.params, flat.own_params, group, "parameters")

    def _rounds(self, gradients: Tensor) -> bool:
        return self._sharing.int8_reduce and gradients.is_floating_point()

    def _start_cross(self, number: int) -> list[Pending]:
        """Those of other groups of ``zero=S/G`` too, and of whoever holds what here is divided."""
        own = self.flats[number].own_grads
        if self.flats[number].bucket.spans_stages or not self._rounds(own):
            return super()._start_cross(number)
        return [quantised.start_all_reduce(own[part], group, "gradients") for part, group in self._crosses[number]]

    def published(self) -> None:
        for turn, number in enumerate(self._turns):
            if number not in self._gathering:
                self.publish(turn)

    def settle(self) -> None:
        for number in list(self._gathering):
            self._arrive(number)

    def enter_unit(self, unit: int, backward: bool) -> None:
        if self._gathering:
            for number in sorted({main.bucket for main in self._used_by[unit]}, reverse=True):
                self._arrive(number)

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
    """Stage 3: parameters are whole from a unit's first use to its last, and the next unit's are fetched meanwhile.

    ``uses`` names the parameters of each unit: its own, and those that it shares. With ``resident`` (a pipeline, which
    has several micro-batches under way) parameters stay whole from the first use in a step to the last, and gradients
    add up before they are sent. Otherwise both come and go with every pass, but for parameters that several units
    share: they stay.
    """

    must_see = True

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
        self._all = [*self.flats, *self.frozen_flats]
        number_of = {slot.held.name: n for n, flat in enumerate(self._all) for slot in flat.bucket.slots}
        self._needs = {unit: sorted({number_of[name] for name in names}) for unit, names in uses.items()}
        self._units = sorted(self._needs)
        users = [sum(number in numbers for numbers in self._needs.values()) for number in range(len(self._all))]
        self._stays = [resident or count > 1 for count in users]
        self._training = False
        for number, flat in enumerate(self._all):
            if not flat.keep_params:
                self._faces[number].hide()

    def begin(self) -> None:
        super().begin()
        self.release()
        self._training = True

    def enter_unit(self, unit: int, backward: bool) -> None:
        place = self._units.index(unit) + (-1 if backward else 1)
        following = self._units[place : place + 1] if place >= 0 else []
        for each in (unit, *following):
            for number in self._needs[each]:
                self._fetch(number)
        for number in self._needs[unit]:
            if (pending := self._gathering.pop(number, None)) is not None:
                pending.wait()

    def leave_unit(self, unit: int) -> None:
        # In training the backward pass begins where the forward pass ends.
        if not (self._training and unit == self._units[-1]):
            self._give_up(unit, last_use=False)

    def unit_done(self, unit: int, final: bool) -> None:
        super().unit_done(unit, final)
        # The next micro-batch begins where the backward pass ends.
        if final or unit != self._units[0]:
            self._give_up(unit, last_use=final)

    def make_ready(self, main: Main) -> None:
        while main.bucket in self._scattering:  # what an earlier micro-batch left there is still being read
            self._settle(len(self._scattering) - 1)
        super().make_ready(main)

    def _between_passes(self, unit: int) -> None:
        super()._between_passes(unit)
        if self._resident:
            return
        for number in dict.fromkeys(main.bucket for main in self._of_unit[unit]):
            if self.flats[number].keep_grads:  # nobody to divide it with
                continue
            self._fill_up(number)
            self._send(number, last=False)
            for main in self._of_bucket[number]:
                main.entered, main.held.parameter.grad = False, None

    @property
    def _turns(self) -> Sequence[int]:
        return [0] * len(self.flats)

    def publish(self, turn: int) -> None:
        pass  # what is gathered when it is used

    def published(self) -> None:
        Sync.published(self)
        self.release()

    def settle(self) -> None:
        pass

    def release(self) -> None:
        for pending in self._gathering.values():
            pending.wait()
        self._gathering.clear()
        for number in range(len(self._all)):
            self._close(number)
        self._training = False

    def _fetch(self, number: int) -> None:
        flat = self._all[number]
        if not is_open(flat.params):
            open_(flat.params)
            self._faces[number].show_whole()
            self._gathering[number] = self._start_gather(flat, self._shards[number])

    def _give_up(self, unit: int, last_use: bool) -> None:
        for number in self._needs[unit]:
            flat = self._all[number]
            shared = self._stays[number] and not (last_use and unit == min(flat.bucket.units))
            if not (shared or number in self._gathering):
                self._close(number)

    def _close(self, number: int) -> None:
        flat = self._all[number]
        if not flat.keep_params and is_open(flat.params):
            close(flat.params)
            self._faces[number].hide()
