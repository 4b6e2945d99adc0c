"""What the parameters of a bucket look like from outside while their values are not there."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.data_parallel.flat import Flat, other_memory
from shoal.storage import same_place


class Faces:
    """Views of the whole while there is a whole; else NaN (zero in whole numbers), since what is behind the views is
    not there, or not yet, and reading that would be an accident. What is always whole stays views."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        slots = flat.bucket.slots if flat.divided or not flat.keep_params else []
        self._parts = [(slot, _nothing(slot.held.parameter)) for slot in slots]
        self._hidden = False

    def show_whole(self) -> None:
        """Raises :class:`ConfigError` where somebody has given a parameter other memory meanwhile."""
        if not self._hidden:
            return
        for slot, nothing in self._parts:
            if not same_place(slot.held.parameter, nothing):
                raise other_memory(slot.held.name)
            slot.held.parameter.data = slot.of(self._flat.params)
        self._hidden = False

    def hide(self) -> None:
        for slot, nothing in self._parts:
            slot.held.parameter.data = nothing
        self._hidden = True


def _nothing(parameter: Tensor) -> Tensor:
    """NaN, or zero in what has none, in the form of ``parameter``."""
    value = torch.tensor(float("nan") if parameter.is_floating_point() else 0.0)
    return value.to(parameter.device, parameter.dtype).expand(parameter.shape)
