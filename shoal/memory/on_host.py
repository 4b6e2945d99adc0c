"""Activations in the host's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.memory.copies import Copies, Copy
from shoal.meter import host_bytes, mark
from shoal.purposes import ACTIVATIONS


class OnHost:
    """Takes the activations of a ``device`` to the host, and back (see :mod:`shoal.memory.activations`).

    What leaves keeps its memory until the unit after the next begins: by then it has gone, as a rule, and the device
    waits for nothing. The host's memory is pinned where there is a GPU; PyTorch takes it again for what comes next, in
    sizes that are powers of two.
    """

    ahead = 1

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, Copies(device)
        self._leaving: list[Copy] = []
        self._left: list[Copy] = []

    def put(self, data: Tensor) -> _OnHost:
        there = host_bytes(len(data), pinned=self._copies.pinned)
        leaving = self._copies.start(there, data)
        if leaving.event is not None:
            self._leaving.append(leaving)
        return _OnHost(there, self._device, self._copies, leaving)

    def next_unit(self) -> None:
        for copy in self._left:
            copy.join()
        self._left, self._leaving = self._leaving, []


class _OnHost:
    def __init__(self, there: Tensor, device: torch.device, copies: Copies, leaving: Copy) -> None:
        self._there, self._device, self._copies = there, device, copies
        self._gone = leaving.event

    def fetch(self) -> Arriving:
        here = room(len(self._there), self._device)
        return Arriving(here, self._copies.start(here, self._there, self._gone))


class Arriving:
    """``here``, into which a copy is under way."""

    def __init__(self, here: Tensor, copy: Copy) -> None:
        self._here, self._copy = here, copy

    def wait(self) -> Tensor:
        self._copy.join()
        return self._here


def room(nbytes: int, device: torch.device) -> Tensor:
    """Memory of the device for activations that come back: uint8 [nbytes]."""
    made = torch.empty(nbytes, dtype=torch.uint8, device=device)
    mark(ACTIVATIONS, made)
    return made
