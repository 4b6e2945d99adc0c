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

from shoal.comm.collectives import Pending, start_all_gather, start_reduce_scatter
from shoal.data_parallel.entry import Main
from shoal.data_parallel.flat import Flat, close, is_open, open_
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
    """A bucket that is being reduced; ``more`` is what has to be added to what earlier passes left in the part."""

    pending: Pending
    more: Tensor | None
    last: bool


class Zero(Sync):
    """Stages 1 and 2: gradients are reduce-scattered, and the updated parameters gathered."""

    def set_up(self) -> None:
        self._scattering: dict[int, _Scatter] = {}
        self._begun: set[int] = set()
        """Buckets whose part has sums of this step."""
        self._crossing: list[tuple[int, list[Pending]]] | None = None

    def begin(self) -> None:
        self._settle(0)
        self._begun.clear()
        self._crossing = None
        super().begin()

    def _send(self, number: int, *, last: bool = True) -> None:
        flat = self.flats[number]
        more = torch.empty_like(flat.own_grads) if number in self._begun else None
        self._begun.add(number)
        if more is not None:
            mark(COMMUNICATION, more)
        into = flat.own_grads if more is None else more
        pending = start_reduce_scatter(into, flat.grads, self._shards[number], "gradients")
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
            # By name, which is the same on all stages that share a parameter.
            crossing = [number for number, crosses in enumerate(self._crosses) if crosses]
            crossing.sort(key=lambda number: self.flats[number].bucket.name)
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

    def published(self) -> None:
        super().published()
        gathers = [
            start_all_gather(flat.params, flat.own_params, group, "parameters")
            for flat, group in zip(self.flats, self._shards, strict=False)
            if flat.keep_params
        ]
        for pending in gathers:
            pending.wait()
        for flat in self.flats:
            flat.see()


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
        self._gathering: dict[int, Pending] = {}
        self._training = False
        self._faces = [_Faces(flat) for flat in self._all]

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

    def published(self) -> None:
        Sync.published(self)
        self.release()

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
            self._gathering[number] = start_all_gather(flat.params, flat.own_params, self._shards[number], "parameters")

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


class _Faces:
    """What the parameters of a divided bucket look like from outside: views of the whole while there is a whole; else
    NaN (zero in whole numbers), since nothing is behind the views, and reading that would be an accident."""

    def __init__(self, flat: Flat) -> None:
        self._parameters = [] if flat.keep_params else [slot.held.parameter for slot in flat.bucket.slots]
        self._views = [parameter.data for parameter in self._parameters]
        self._nothing = [_nothing(parameter) for parameter in self._parameters]
        self.hide()

    def show_whole(self) -> None:
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view

    def hide(self) -> None:
        for parameter, nothing in zip(self._parameters, self._nothing, strict=True):
            parameter.data = nothing


def _nothing(parameter: Tensor) -> Tensor:
    """NaN, or zero in what has none, in the form of ``parameter``."""
    value = torch.tensor(float("nan") if parameter.is_floating_point() else 0.0)
    return value.to(parameter.device, parameter.dtype).expand(parameter.shape)
