"""Parameters that come when a unit needs them and go when it has been used: divided over ranks (ZeRO-3), or kept on the
host or a disk, or both.

They are whole from a unit's first use to its last, and the next unit's are fetched meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from shoal.comm.collectives import Pending
from shoal.comm.world import Group
from shoal.data_parallel.faces import Faces
from shoal.data_parallel.flat import Flat, close, is_open, open_
from shoal.optim.away import Arrival


class Visits:
    """Opens and closes the buckets ``flats``, each divided over the group that ``groups`` has for it; ``gather`` begins
    to make a whole of the parts.

    ``uses`` names the parameters of each unit: its own, and those that it shares. With ``resident`` (a pipeline, which
    has several micro-batches under way) parameters stay whole from the first use in a step to the last. Otherwise they
    come and go with every pass, but for those that several units share: they stay.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        groups: Sequence[Group],
        uses: Mapping[int, Sequence[str]],
        gather: Callable[[Tensor, Tensor, Group], Pending],
        *,
        resident: bool,
    ) -> None:
        self._flats, self._groups, self._gather = flats, groups, gather
        number_of = {slot.held.name: n for n, flat in enumerate(flats) for slot in flat.bucket.slots}
        self._needs = {
            unit: sorted({number_of[name] for name in names if name in number_of}) for unit, names in uses.items()
        }
        self._units = sorted(self._needs)
        users = [sum(number in numbers for numbers in self._needs.values()) for number in range(len(flats))]
        self._stays = [resident or count > 1 for count in users]
        self._coming: dict[int, tuple[Pending, list[Arrival]]] = {}
        self._training = False
        self._faces = [Faces(flat) for flat in flats]
        for face, flat in zip(self._faces, flats, strict=True):
            if not flat.keep_params:
                face.hide()

    def begin(self) -> None:
        """A step begins."""
        self.release()
        self._training = True

    def enter(self, unit: int, backward: bool) -> None:
        """The parameters of ``unit`` are about to be used."""
        place, way = self._units.index(unit), -1 if backward else 1
        after = [self._units[at] for at in (place + way, place + 2 * way) if 0 <= at < len(self._units)]
        for each in (unit, *after[:1]):
            for number in self._needs[each]:
                self._fetch(number)
        for number in self._needs[unit]:
            if (coming := self._coming.pop(number, None)) is not None:
                pending, arrivals = coming
                for arrival in arrivals:
                    arrival.join()
                pending.wait()
        for each in after[1:]:
            for number in self._needs[each]:
                if not is_open(self._flats[number].params):
                    for parked in self._flats[number].stowage.parked:
                        parked.kept.begin()

    def leave(self, unit: int) -> None:
        """The forward pass of ``unit`` is over."""
        # In training the backward pass begins where the forward pass ends.
        if not (self._training and unit == self._units[-1]):
            self._give_up(unit, last_use=False)

    def done(self, unit: int, final: bool) -> None:
        """A backward pass of ``unit`` is over, the ``final`` one or not."""
        # The next micro-batch begins where the backward pass ends.
        if final or unit != self._units[0]:
            self._give_up(unit, last_use=final)

    def release(self) -> None:
        """Nothing is used any more."""
        for pending, arrivals in self._coming.values():
            for arrival in arrivals:
                arrival.join()
            pending.wait()
        self._coming.clear()
        for number in range(len(self._flats)):
            self._close(number)
        self._training = False

    def _fetch(self, number: int) -> None:
        flat = self._flats[number]
        if is_open(flat.params):
            return
        open_(flat.params)
        self._faces[number].show_whole()
        own = flat.own_params
        arrivals: list[Arrival] = []
        if flat.stowage.parked:
            own = flat.params[flat.bucket.low : flat.bucket.high]
            arrivals = flat.stowage.lift_params(own, flat.own_params)
        with flat.stowage.rising():
            pending = self._gather(flat.params, own, self._groups[number])
        self._coming[number] = pending, arrivals

    def _give_up(self, unit: int, last_use: bool) -> None:
        for number in self._needs[unit]:
            flat = self._flats[number]
            shared = self._stays[number] and not (last_use and unit == min(flat.bucket.units))
            if not (shared or number in self._coming):
                self._close(number)

    def _close(self, number: int) -> None:
        flat = self._flats[number]
        if not flat.keep_params and is_open(flat.params):
            close(flat.params)
            self._faces[number].hide()
        for parked in flat.stowage.parked:
            parked.kept.settle()
