"""Where model states live that are not on the device.

This rank's part of a bucket is cut into segments; in each, masters with optimizer states, parameters, and gradients
have one home apiece: the device, the host, or a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.data_parallel.buckets import Bucket
from shoal.data_parallel.shelves import AnyShelf, DeviceShelf, Found, HostShelf, Segment
from shoal.optim.away import Arrival, Kept
from shoal.purposes import GRADIENTS, PARAMETERS, STATES

DEVICE = "device"
DISK = "nvme"


class Homes(Protocol):
    """Makes places for tensors."""

    def keep(self, where: str, values: Tensor, part: str) -> Kept:
        """A tensor in ``where`` ("cpu" or "nvme"), which begins as a copy of ``values`` and is for ``part``."""

    def on_device(self, found: Found) -> Kept:
        """What is on the device, to be used on the host."""

    def reserve(self, nbytes: Sequence[int]) -> None:
        """Tensors of these sizes will be kept on disk."""

    def memory(self) -> list[Tensor]:
        """All that is in the host's memory of them, and what lies ready there for what comes and goes."""

    def rising(self) -> AbstractContextManager[object]:
        """What the device begins meanwhile comes after all copies to it that have begun, and waits for nothing else."""


class Portion(NamedTuple):
    """A ``fraction`` of something lives in ``where``."""

    where: str = DEVICE
    fraction: float = 0.0


ALL_HERE = Portion()


@dataclass(frozen=True)
class Away:
    """What does not live on the device. Gradients that the host needs are copied there as soon as they are sums
    (``early``), unless there may be sums of several batches. Segments have at most ``longest`` elements."""

    homes: Homes | None = None
    optimizer: Portion = ALL_HERE
    params: Portion = ALL_HERE
    grads: bool = False
    early: bool = True
    longest: int = 1 << 20


NOTHING = Away()


def segments_of(bucket: Bucket, away: Away, *, trains: bool) -> list[Segment]:
    """The segments of a bucket. Of every bucket the same fraction is away, from its beginning on: so all ranks that
    hold a part alike cut it alike."""
    size = bucket.high - bucket.low
    optimizer, params = (
        ceil(portion.fraction * size) if portion.where != DEVICE else 0
        for portion in (away.optimizer if trains else ALL_HERE, away.params)
    )
    return [
        Segment(
            start,
            stop,
            away.optimizer.where if start < optimizer else DEVICE,
            away.params.where if start < params else DEVICE,
        )
        for start, stop in pairwise(sorted({size, optimizer, params, *range(0, size, away.longest)}))
    ]


def reserve(away: Away | None, trained: Iterable[Bucket], frozen: Iterable[Bucket]) -> None:
    """See that there is room on disk for what :class:`Stowage` will keep there."""
    if away is None or away.homes is None:
        return
    sizes = []
    for bucket, trains in (*((one, True) for one in trained), *((one, False) for one in frozen)):
        wide = max(bucket.dtype.itemsize, torch.float32.itemsize)
        for start, stop, optimizer, params in segments_of(bucket, away, trains=trains):
            sizes += [(stop - start) * wide] * ((1 + len(bucket.states)) * (optimizer == DISK))
            sizes += [(stop - start) * bucket.dtype.itemsize] * (params == DISK)
    away.homes.reserve(sizes)


def on_host(away: Away | None) -> list[Tensor]:
    """The host memory of what does not live on the device."""
    return [] if away is None or away.homes is None else away.homes.memory()


class Parked(NamedTuple):
    """Consecutive elements of this rank's part of a bucket's parameters that do not live on the device."""

    start: int
    stop: int
    kept: Kept


class Owner(Protocol):
    """What has this rank's part of a bucket on the device, as far as it is there."""

    own_params: Tensor
    own_grads: Tensor


class Stowage:
    """What of one bucket's part is away. ``mixed`` says that the optimizer works on masters in another precision than
    that of parameters.

    The first ``cut`` elements are updated as shelves, the rest as if nothing were away. The first ``parked_to``
    parameters are parked.
    """

    def __init__(self, bucket: Bucket, away: Away | None, *, trains: bool, mixed: bool) -> None:
        self._bucket, self._away = bucket, away or NOTHING
        self.segments = segments_of(bucket, self._away, trains=trains)
        self.grads = trains and self._away.grads
        self.by_matrix = trains and any(box.treatment.by_matrix for box in bucket.own_boxes())
        self.parked_to = max((one.stop for one in self.segments if one.params != DEVICE), default=0)
        self.apart = mixed or (self.by_matrix and self.parked_to > 0)
        """Whether masters are apart from parameters also where both are on the device."""
        shelved = max((one.stop for one in self.segments if one.optimizer != DEVICE), default=0)
        shelved = shelved if self.apart else max(shelved, self.parked_to)
        self.cut = 0 if not trains else bucket.high - bucket.low if self.grads else shelved
        self.parked: list[Parked] = []
        self.shelves: list[AnyShelf] = []

    def fill(self, exact: Tensor, states: dict[str, torch.dtype], owner: Owner) -> None:
        """Keep what is away, from initial values: those of masters are ``exact``."""
        if self._away is NOTHING:
            return
        homes = self._away.homes
        assert homes is not None
        for start, stop, _, where in self.segments:
            if where != DEVICE:
                self.parked.append(Parked(start, stop, homes.keep(where, owner.own_params[start:stop], PARAMETERS)))
        parked = {one.start: one.kept for one in self.parked}
        for at in (one for one in self.segments if one.start < self.cut):
            start, stop, where, _ = at
            own_grads = Found(partial(_own_grads, owner, slice(start, stop)))
            below = slice(start - self.parked_to, stop - self.parked_to)
            own_params = Found(partial(_own_params, owner, below))
            grads = None
            if self.grads or (self._away.early and where == "cpu"):
                grads = homes.keep("cpu", torch.zeros_like(own_grads.tensor), GRADIENTS)
            if where == DEVICE:
                there = {name: torch.zeros_like(exact[start:stop], dtype=dtype) for name, dtype in states.items()}
                params: Kept | Found = parked.get(start) or own_params
                masters = params
                if self.apart:
                    masters = Found(partial(torch.Tensor.detach, exact[start:stop].clone()))
                beside = params if self.apart else None
                visits = self._bucket, at, masters, there, grads, own_grads, beside
                self.shelves.append(DeviceShelf(*visits, grad_dtype=own_grads.tensor.dtype))
                continue
            empty = {name: exact.new_zeros(stop - start, dtype=dtype) for name, dtype in states.items()}
            kept = {name: homes.keep(where, values, STATES) for name, values in empty.items()}
            given = homes.keep(where, exact[start:stop], STATES), kept, grads or homes.on_device(own_grads)
            up = parked.get(start) or homes.on_device(own_params)
            self.shelves.append(HostShelf(self._bucket, at, *given, up, hosted=grads is not None))

    def lower_gradients(self, own_grads: Tensor, *, add: bool = False) -> None:
        """Sums of gradients are there: those that the host needs go there."""
        for shelf in self.shelves:
            if shelf.hosted:
                assert shelf.grads is not None
                shelf.grads.lower(own_grads[shelf.at.start : shelf.at.stop], add=add)

    def rising(self) -> AbstractContextManager[object]:
        """See :meth:`Homes.rising`."""
        return nullcontext() if self._away.homes is None else self._away.homes.rising()

    def lift_params(self, own: Tensor, rest: Tensor) -> list[Arrival]:
        """Start to bring this rank's part of the parameters together in ``own``; the ``rest`` is on the device."""
        own[self.parked_to :].copy_(rest)
        return [kept.lift(own[start:stop]) for start, stop, kept in self.parked]


def _own_grads(owner: Owner, part: slice) -> Tensor:
    return owner.own_grads[part]


def _own_params(owner: Owner, part: slice) -> Tensor:
    return owner.own_params[part]
