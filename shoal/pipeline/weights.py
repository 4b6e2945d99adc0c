"""Versions of the weights that passes under way compute with (weight stashing, Narayanan et al. 2019).

An asynchronous pipeline updates weights between a micro-batch's forward and its backward pass, which must see the ones
that the forward pass saw. A version is a set of parameters in memory of its own, to which the graphs of passes refer.
Modules have the newest. An update makes another one, in memory that no pass needs any more if there is some; a version
that no pass refers to is written over.

With vertical sync a micro-batch comes to a stage that has made updates since it entered the pipeline, and uses older
weights than the newest. So versions that are young enough are kept for passes to come.

Gradients of a version's parameters go where those of the parameters that it stands for go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Memory(Protocol):
    """Some parameters of a model side by side."""

    params: Tensor

    def move(self, params: Tensor, faces: Sequence[nn.Parameter]) -> None:
        """From here on they are in ``params``, of which modules have the views ``faces``."""


class Place(NamedTuple):
    """A parameter of some memory: from which element on it lies there, and what takes in its gradients."""

    parameter: nn.Parameter
    start: int
    take: Callable[[Tensor], None]


class Version:
    """One set of parameters, in ``buffers``; ``users`` are the passes whose graphs refer to them."""

    def __init__(self, buffers: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
        self.buffers, self.parameters = buffers, parameters
        self.users = 0


class Weights:
    """The versions of the parameters of ``module`` that are in ``memories``, each with the places of its own. A forward
    pass may use weights that are up to ``oldest`` updates older than the newest."""

    def __init__(
        self, module: nn.Module, memories: Sequence[tuple[Memory, Sequence[Place]]], *, oldest: int = 0
    ) -> None:
        self._memories = memories
        places = [place for _, those in memories for place in those]
        number = {place.parameter: at for at, place in enumerate(places)}
        self._slots = [
            (owner, name, number[parameter])
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter in number
        ]
        self.newest = self._shown = self._version([memory.params for memory, _ in memories])
        self._versions = [self.newest]
        self._recent = deque(self._versions, maxlen=oldest + 1)
        """After each of the last updates, the newest."""
        self._place(self.newest)
        self._show(self.newest)

    @property
    def alive(self) -> int:
        """How many versions are the newest or needed by a pass, under way or to come."""
        return sum(self._needed(version) for version in self._versions)

    def older(self, age: int) -> Version:
        """What was the newest version ``age`` updates ago."""
        return self._recent[-1 - age]

    def use(self, version: Version) -> None:
        """Have the modules compute with ``version``."""
        if version is not self._shown:
            self._show(version)

    def advance(self) -> None:
        """An update is about to be published: to memory that no pass refers to, nor will."""
        if len(self._recent) == self._recent.maxlen:
            self._recent.popleft()
        if self._needed(self.newest):
            free = next((version for version in self._versions if not self._needed(version)), None)
            if free is None:
                free = self._version([torch.empty_like(buffer) for buffer in self.newest.buffers])
                self._versions.append(free)
            self._place(free)
            self.newest = free
        self._recent.append(self.newest)
        self.use(self.newest)

    def stay(self) -> None:
        """An update has been skipped: what it would have made is what there is."""
        self._recent.append(self.newest)

    def settle(self) -> None:
        """No pass is under way, and those to come begin with the newest version."""
        self._recent = deque([self.newest], maxlen=self._recent.maxlen)
        self.use(self.newest)

    def _needed(self, version: Version) -> bool:
        return version.users > 0 or version in self._recent

    def _place(self, version: Version) -> None:
        """Have the memories in ``version``."""
        parameters = iter(version.parameters)
        for (memory, places), buffer in zip(self._memories, version.buffers, strict=True):
            memory.move(buffer, list(islice(parameters, len(places))))

    def _version(self, buffers: Sequence[Tensor]) -> Version:
        made = [
            _stand_in(place, buffer)
            for (_, places), buffer in zip(self._memories, buffers, strict=True)
            for place in places
        ]
        return Version(buffers, made)

    def _show(self, version: Version) -> None:
        for owner, name, at in self._slots:
            owner._parameters[name] = version.parameters[at]
        self._shown = version


def _stand_in(place: Place, buffer: Tensor) -> nn.Parameter:
    """A parameter for one of a version in ``buffer``."""
    one = place.parameter
    made = nn.Parameter(buffer[place.start : place.start + one.numel()].view(one.shape))
    for kept in ("main", "sink"):
        if (value := getattr(one, kept, None)) is not None:
            setattr(made, kept, value)

    def give(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            place.take(gradient)

    made.register_post_accumulate_grad_hook(give)
    return made
