"""Parts of a bucket of which an update needs something that lives elsewhere than where it happens.

If the states are away, the update runs on the host (ZeRO-Offload, Ren et al. 2021): the gradients come down and the new
parameters go up. If only parameters or gradients are, they visit the device for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.data_parallel.buckets import Bucket, OwnBox
from shoal.optim.away import Arrival, Kept
from shoal.optim.runs import Run


class Found:
    """A tensor on the device that is not the same one at all times."""

    def __init__(self, find: Callable[[], Tensor]) -> None:
        self._find = find

    @property
    def tensor(self) -> Tensor:
        """It, now."""
        return self._find()


class Segment(NamedTuple):
    """Consecutive elements of this rank's part of a bucket, and where their masters and states, and their parameters,
    live."""

    start: int
    stop: int
    optimizer: str
    params: str


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
            copy=None if copies is None else copies[run],
        )
