"""ZeRO (Rajbhandari et al. 2020): replicas divide what they would all keep.

Of Ψ parameters over N ranks, each rank updates Ψ/N and keeps the optimizer states of those (stage 1), of gradients
keeps only those once they are reduced (stage 2), of parameters too (stage 3), which are then gathered a unit at a
time, for as long as it is used. A step receives 2(N−1)/N·Ψ words under stages 1 and 2 whatever the accumulation, since
gradients of micro-batches add up before they are sent; under stage 3 each pass gathers, so at most
3(N−1)/N·Ψ with one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shoal.comm.collectives import Pending, start_all_gather, start_reduce_scatter
from shoal.data_parallel.flat import close, is_open, open_
from shoal.data_parallel.sync import Sync

IN_FLIGHT = 2
"""Whole buckets of gradients that may be under way at once where they are not kept: sending waits for older ones."""


class Zero(Sync):
    """Stages 1 and 2: gradients are reduce-scattered, and the updated parameters gathered."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._scattering: dict[int, Pending] = {}

    def begin(self) -> None:
        self._settle(0)
        super().begin()

    def _send(self, number: int) -> None:
        flat = self.flats[number]
        group = self._mesh.group(flat.bucket.shard)
        self._scattering[number] = start_reduce_scatter(flat.own_grads, flat.grads, group, "gradients")
        if not flat.keep_grads:
            self._settle(IN_FLIGHT)

    def _settle(self, most: int) -> None:
        """Wait until at most ``most`` buckets are being scattered, oldest first."""
        while len(self._scattering) > most:
            number = next(iter(self._scattering))
            self._scattering.pop(number).wait()
            if not self.flats[number].keep_grads:
                close(self.flats[number].grads)

    def _complete(self) -> None:
        self._settle(0)
        # By name, which is the same on all stages that share a parameter.
        order = sorted(range(len(self.flats)), key=lambda number: self.flats[number].bucket.name)
        for number, under_way in [(number, self._start_cross(number)) for number in order]:
            for pending in under_way:
                pending.wait()
            self._add_squares(number)

    def updated(self) -> None:
        gathers = []
        for flat in reversed(self.flats):  # the first units are needed first
            if flat.keep_params:
                group = self._mesh.group(flat.bucket.shard)
                gathers.append(start_all_gather(flat.params, flat.own_params, group, "parameters"))
        for pending in gathers:
            pending.wait()


class ZeroThree(Zero):
    """Stage 3: parameters are whole from a unit's first use to its last, and the next unit's are fetched meanwhile.

    ``uses`` says which parameters each unit uses: its own, and those that it shares. With ``resident`` (a pipeline,
    which has several micro-batches under way) they stay whole from the first use in a step to the last, instead of
    being gathered for every pass; so do parameters that several units share.
    """

    def __init__(self, *arguments: Any, uses: Mapping[int, Sequence[str]], resident: bool, **options: Any) -> None:
        super().__init__(*arguments, **options, keep_params=False, keep_grads=False, cap_bytes=0)
        number_of = {main.held.name: main.bucket for main in self._mains}
        self._needs = {
            unit: sorted({number_of[name] for name in names if name in number_of}) for unit, names in uses.items()
        }
        self._units = sorted(self._needs)
        users = [sum(number in numbers for numbers in self._needs.values()) for number in range(len(self.flats))]
        self._stays = [resident or count > 1 for count in users]
        self._gathering: dict[int, Pending] = {}
        self._training = False
        divided = [m.held.parameter for m in self._mains if not self.flats[m.bucket].keep_params]
        self._views = {parameter: parameter.data for parameter in divided}
        # Between steps there is nothing behind the views, and reading it would be an accident: NaN tells.
        self._shells = {p: p.new_full((), float("nan"), requires_grad=False).expand(p.shape) for p in divided}
        self._show(self._shells)

    def begin(self) -> None:
        super().begin()
        self.release()
        self._training = True

    def enter_unit(self, unit: int, backward: bool) -> None:
        if self._shelved:
            self._show(self._views)
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

    def updated(self) -> None:
        self.release()

    def release(self) -> None:
        for pending in self._gathering.values():
            pending.wait()
        self._gathering.clear()
        for flat in self.flats:
            if not flat.keep_params:
                close(flat.params)
        self._training = False
        self._show(self._shells)

    def _show(self, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        """What the divided parameters look like from outside."""
        for parameter, tensor in tensors.items():
            parameter.data = tensor
        self._shelved = tensors is self._shells

    def _fetch(self, number: int) -> None:
        flat = self.flats[number]
        if not is_open(flat.params):
            open_(flat.params)
            group = self._mesh.group(flat.bucket.shard)
            self._gathering[number] = start_all_gather(flat.params, flat.own_params, group, "parameters")

    def _give_up(self, unit: int, last_use: bool) -> None:
        for number in self._needs[unit]:
            flat = self.flats[number]
            shared = self._stays[number] and not (last_use and unit == min(flat.bucket.units))
            if not (flat.keep_params or shared or number in self._gathering):
                close(flat.params)
