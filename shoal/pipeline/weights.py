"""Versions of the weights that passes under way compute with (weight stashing, Narayanan et al. 2019).

An asynchronous pipeline updates weights between a micro-batch's forward and its backward pass, which must see the ones
that the forward pass saw. The parameters lie in buffers that the optimizer writes to in place. A version is a set of
parameters over those buffers, of which modules have the newest: the graphs of passes refer to them. Before an update
writes, a version that passes still refer to moves to a copy of the old values; a new one takes its place over the
buffers. So the newest costs nothing, and there are as many copies as there are older versions in use.

Gradients of a version's parameters go where those of the parameters themselves go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """A parameter, a view of ``buffer`` from element ``start`` on; ``take`` takes in a gradient of it."""

    parameter: nn.Parameter
    buffer: Tensor
    start: int
    take: Callable[[Tensor], None]


class Version:
    """One set of parameters; ``users`` are the passes whose graphs refer to them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.users = 0


class Weights:
    """The versions of the parameters at ``places``, in ``module``."""

    def __init__(self, module: nn.Module, places: Sequence[Place]) -> None:
        self._places = places
        number = {place.parameter: at for at, place in enumerate(places)}
        self._slots = [
            (owner, name, number[parameter])
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter in number
        ]
        self._spare: list[tuple[Version, list[Tensor]]] = []
        self._stashed: list[tuple[Version, list[Tensor]]] = []
        self._buffers = list({id(place.buffer): place.buffer for place in places}.values())
        self.newest = self._shown = self._new()
        self._show(self.newest)

    @property
    def alive(self) -> int:
        """How many versions have values of their own: the newest, and those that passes still need."""
        return 1 + sum(version.users > 0 for version, _ in self._stashed)

    def use(self, version: Version) -> None:
        """Have the modules compute with ``version``."""
        if version is not self._shown:
            self._show(version)

    def before_update(self) -> None:
        """The buffers are about to be written to: keep what is still needed of them."""
        kept = [one for one in self._stashed if one[0].users > 0]
        self._spare += [one for one in self._stashed if one[0].users == 0]
        self._stashed = kept
        old = self.newest
        if old.users == 0:
            return
        new, copies = self._spare.pop() if self._spare else (self._new(), list(map(torch.empty_like, self._buffers)))
        with torch.no_grad():
            for copy, buffer in zip(copies, self._buffers, strict=True):
                copy.copy_(buffer)
        copy_of = {id(buffer): copy for buffer, copy in zip(self._buffers, copies, strict=True)}
        for place, moved, fresh in zip(self._places, old.parameters, new.parameters, strict=True):
            moved.data = _view(copy_of[id(place.buffer)], place)
            fresh.data = _view(place.buffer, place)
        self._stashed.append((old, copies))
        self.newest = new
        self._show(new)

    def _new(self) -> Version:
        return Version([self._alias(place) for place in self._places])

    def _alias(self, place: Place) -> nn.Parameter:
        alias = nn.Parameter(_view(place.buffer, place))
        for kept in ("main", "sink"):
            if (value := getattr(place.parameter, kept, None)) is not None:
                setattr(alias, kept, value)

        def give(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                place.take(gradient)

        alias.register_post_accumulate_grad_hook(give)
        return alias

    def _show(self, version: Version) -> None:
        for owner, name, at in self._slots:
            owner._parameters[name] = version.parameters[at]
        self._shown = version


def _view(buffer: Tensor, place: Place) -> Tensor:
    parameter = place.parameter
    return buffer[place.start : place.start + parameter.numel()].view(parameter.shape)
