"""Where model states live that are not on the device, and how an update finds them.

This rank's part of a bucket is cut into segments; in each, masters with optimizer states, parameters, and gradients
have one home apiece: the device, the host, or a file. A segment of which an update needs something from elsewhere is a
shelf. If its states are away, the update runs on the host (ZeRO-Offload, Ren et al. 2021): the gradients come down and
the new parameters go up. If only parameters or gradients are, they visit the device for the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from math import ceil
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.data_parallel.buckets import Bucket, OwnBox
from shoal.optim.away import Arrival, Kept
from shoal.optim.runs import Run

DEVICE = "device"
DISK = "nvme"


class Found:
    """A tensor on the device that is not the same one at all times."""

    def __init__(self, find: Callable[[], Tensor]) -> None:
        self._find = find

    @property
    def tensor(self) -> Tensor:
        """It, now."""
        return self._find()


class Homes(Protocol):
    """Makes places for tensors."""

    def keep(self, where: str, values: Tensor) -> Kept:
        """A tensor in ``where`` ("cpu" or "nvme"), which begins as a copy of ``values``."""

    def on_device(self, found: Found) -> Kept:
        """What is on the device, to be used on the host."""

    def reserve(self, nbytes: Sequence[int]) -> None:
        """Tensors of these sizes will be kept on disk."""

    def rising(self) -> AbstractContextManager[object]:
        """What the device begins meanwhile comes after all copies to it that have begun, and waits for nothing else."""


class Portion(NamedTuple):
    """A ``fraction`` of something lives in ``where``."""

    where: str = DEVICE
    fraction: float = 0.0


@dataclass(frozen=True)
class Away:
    """What does not live on the device. Gradients that the host needs are copied there as soon as they are sums
    (``early``), unless there may be sums of several batches. Segments have at most ``longest`` elements."""

    homes: Homes | None = None
    optimizer: Portion = Portion()
    params: Portion = Portion()
    grads: bool = False
    early: bool = True
    longest: int = 1 << 20


_NOTHING = Away()


class Segment(NamedTuple):
    """Consecutive elements of this rank's part of a bucket, and where their masters and states, and their parameters,
    live."""

    start: int
    stop: int
    optimizer: str
    params: str


def segments_of(bucket: Bucket, away: Away, *, trains: bool) -> list[Segment]:
    """The segments of a bucket. Of every bucket the same fraction is away, from its beginning on: so all ranks that
    hold a part alike cut it alike."""
    size = bucket.high - bucket.low
    optimizer, params = (
        ceil(portion.fraction * size) if portion.where != DEVICE else 0
        for portion in (away.optimizer if trains else Portion(), away.params)
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


class HostShelf:
    """A segment that is updated on the host, where its ``masters`` and ``states`` are or come. ``hosted`` says that
    sums of gradients are kept there as soon as there are any."""

    def __init__(
        self,
        bucket: Bucket,
        at: Segment,
        masters: Kept,
        states: dict[str, Kept],
        grads: Kept,
        params: Kept,
        *,
        hosted: bool,
    ) -> None:
        self._bucket, self.at, self.hosted = bucket, at, hosted
        self.masters, self.states, self.grads, self.params = masters, states, grads, params

    def fetch(self) -> None:
        for kept in (self.masters, *self.states.values(), self.grads):
            kept.begin()

    def runs(self) -> list[Run]:
        states = {name: state.here() for name, state in self.states.items()}
        return list(runs_on(self._bucket, self.at, self.masters.here(), self.grads.here, states, self.params.blank()))

    def leave(self) -> None:
        for kept in (self.params, self.masters, *self.states.values()):
            kept.end()
        self.grads.end(changed=False)

    def settle(self) -> None:
        for kept in (self.params, self.masters, *self.states.values(), self.grads):
            kept.settle()

    def publish(self) -> None:
        """The masters have new values: have the model compute with them."""
        self.masters.begin()
        self.params.blank().copy_(self.masters.here())
        self.params.end()
        self.masters.end(changed=False)
        self.settle()

    def view(self, kind: str) -> Tensor:
        """The weights, as exact as they are kept, or an optimizer state; between updates."""
        return (self.masters if kind == "weight" else self.states[kind]).view()

    def gradient(self) -> Tensor:
        """The reduced gradients, which are kept on the host."""
        return self.grads.view()

    def remain(self) -> Iterator[Run]:
        """For an optimizer that needs all at once. What is on the host stays there; gradients come when asked for."""
        states = {name: state.here() for name, state in self.states.items()}

        def grads() -> Tensor:
            self.grads.begin()
            return self.grads.here()

        yield from runs_on(self._bucket, self.at, self.masters.here(), grads, states)


class DeviceShelf:
    """A segment that is updated on the device, where its ``states`` are; ``masters`` and ``grads`` visit it, those that
    are kept elsewhere. ``params`` is where new parameters go that are apart from the masters."""

    def __init__(
        self,
        bucket: Bucket,
        at: Segment,
        masters: Kept | Found,
        states: dict[str, Tensor],
        grads: Kept | None,
        own_grads: Found,
        params: Kept | Found | None,
        *,
        grad_dtype: torch.dtype,
    ) -> None:
        self._bucket, self.at, self.hosted = bucket, at, grads is not None
        self.masters, self.states, self.grads, self._own_grads = masters, states, grads, own_grads
        self._params, self._grad_dtype = params, grad_dtype
        self._masters: tuple[Tensor, Arrival] | None = None
        self._grads: tuple[Tensor, Arrival] | None = None

    def fetch(self) -> None:
        if not isinstance(self.masters, Found):
            self._masters = self._visit(self.masters, self._bucket.dtype)
        if self.grads is not None:
            self._grads = self._visit(self.grads, self._grad_dtype)

    def _visit(self, kept: Kept, dtype: torch.dtype) -> tuple[Tensor, Arrival]:
        room = torch.empty(self.at.stop - self.at.start, dtype=dtype, device=self._bucket.device)
        return room, kept.lift(room)

    def runs(self) -> list[Run]:
        found = []
        for here, visit in ((self.masters, self._masters), (self._own_grads, self._grads)):
            if visit is not None:
                visit[1].join()
                found.append(visit[0])
            else:
                assert isinstance(here, Found)
                found.append(here.tensor)
        masters, grads = found
        return list(runs_on(self._bucket, self.at, masters, lambda: grads, self.states))

    def leave(self) -> None:
        if self._masters is not None and not isinstance(self.masters, Found):
            self.masters.lower(self._masters[0])
        self._masters = self._grads = None
        self.publish()

    def settle(self) -> None:
        for one in (self.masters, self.grads, self._params):
            if one is not None and not isinstance(one, Found):
                one.settle()

    def publish(self) -> None:
        """The masters have new values: have the model compute with them."""
        if self._params is None:
            return
        assert isinstance(self.masters, Found)
        if isinstance(self._params, Found):
            self._params.tensor.copy_(self.masters.tensor)
        else:
            self._params.lower(self.masters.tensor.to(self._bucket.dtype))

    def view(self, kind: str) -> Tensor:
        """The weights, as exact as they are kept, or an optimizer state; between updates."""
        if kind != "weight":
            return self.states[kind]
        return self.masters.tensor if isinstance(self.masters, Found) else self.masters.view()

    def gradient(self) -> Tensor:
        """The reduced gradients, which are kept on the host."""
        assert self.grads is not None
        return self.grads.view()

    def remain(self) -> Iterator[Run]:
        """For an optimizer that needs all at once; its masters are on the device."""
        assert isinstance(self.masters, Found)

        def grads() -> Tensor:
            if self.grads is None:
                return self._own_grads.tensor
            room, arrival = self._visit(self.grads, self._grad_dtype)
            arrival.join()
            return room

        yield from runs_on(self._bucket, self.at, self.masters.tensor, grads, self.states)


AnyShelf = HostShelf | DeviceShelf


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
        self._bucket, self._away = bucket, away or _NOTHING
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
        if self._away is _NOTHING:
            return
        homes = self._away.homes
        assert homes is not None
        for start, stop, _, where in self.segments:
            if where != DEVICE:
                self.parked.append(Parked(start, stop, homes.keep(where, owner.own_params[start:stop])))
        parked = {one.start: one.kept for one in self.parked}
        for at in (one for one in self.segments if one.start < self.cut):
            start, stop, where, _ = at
            own_grads = Found(lambda part=slice(start, stop): owner.own_grads[part])
            below = slice(start - self.parked_to, stop - self.parked_to)
            own_params = Found(lambda part=below: owner.own_params[part])
            grads = None
            if self.grads or (self._away.early and where == "cpu"):
                grads = homes.keep("cpu", torch.zeros_like(own_grads.tensor))
            if where == DEVICE:
                there = {name: torch.zeros_like(exact[start:stop], dtype=dtype) for name, dtype in states.items()}
                params: Kept | Found = parked.get(start) or own_params
                masters = params
                if self.apart:
                    masters = Found(lambda own=exact[start:stop].clone(): own)
                beside = params if self.apart else None
                visits = self._bucket, at, masters, there, grads, own_grads, beside
                self.shelves.append(DeviceShelf(*visits, grad_dtype=own_grads.tensor.dtype))
                continue
            away = {name: exact.new_zeros(stop - start, dtype=dtype) for name, dtype in states.items()}
            kept = {name: homes.keep(where, values) for name, values in away.items()}
            given = homes.keep(where, exact[start:stop]), kept, grads or homes.on_device(own_grads)
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


def _part(whole: Callable[[], Tensor], part: slice) -> Tensor:
    return whole()[part]


def runs_on(
    bucket: Bucket,
    at: Segment,
    masters: Tensor,
    grads: Callable[[], Tensor],
    states: dict[str, Tensor],
    copies: Tensor | None = None,
) -> Iterator[Run]:
    """The runs of parameters in a segment that are treated alike; of an optimizer that works on whole matrices, boxes
    of one. ``copies`` is where new values go besides."""

    def apart(box: OwnBox) -> tuple[object, ...]:
        return box.treatment, box.piece if box.treatment.by_matrix else None

    for _, alike in groupby(bucket.own_boxes(at.start, at.stop), key=apart):
        boxes = list(alike)
        first, last = boxes[0], boxes[-1]
        run = slice(first.start - at.start, last.stop - at.start)
        yield Run(
            masters[run],
            partial(_part, grads, run),
            {name: state[run] for name, state in states.items()},
            first.treatment,
            first.piece if first.treatment.by_matrix else None,
            f"{bucket.name}/{bucket.low + first.start}",
            None if copies is None else copies[run],
        )
