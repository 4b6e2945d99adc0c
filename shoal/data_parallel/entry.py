"""The one way in for gradients, from autograd or from a linear map that makes them where they are kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.data_parallel.buckets import Slot
from shoal.data_parallel.flat import Flat
from shoal.errors import ConfigError

_NONE = torch.empty(0)
"""In place of a gradient that there is not yet."""


class Main:
    """The way in for the gradient of one parameter of bucket number ``bucket``. It is kept in ``gradient``: a part of
    the bucket's buffer, or, where nobody shares it (not ``buffered``), the tensor that autograd has made, which saves a
    pass over memory. ``make_ready`` is called before a contribution enters a buffer."""

    def __init__(self, slot: Slot, bucket: int, flat: Flat, make_ready: Callable[[Main], None]) -> None:
        self.held, self.bucket = slot.held, bucket
        self.buffered = flat.buffered
        self.gradient = slot.of(flat.grads) if self.buffered else _NONE
        self.entered = False
        """Whether a contribution of this step is in the buffer; before, the buffer holds what an earlier one left."""
        self._make_ready = make_ready

    def begin(self) -> None:
        """A step begins: there is no gradient."""
        self.entered, self.held.parameter.grad = False, None
        if not self.buffered:
            self.gradient = _NONE

    def complete(self) -> None:
        """Every contribution of the step has come. What still came would lie in ``grad``, where it is found."""
        parameter = self.held.parameter
        if not self.buffered and parameter.grad is not None:
            self.gradient, self.entered = parameter.grad, True
        parameter.grad = None

    @property
    def settled(self) -> bool:
        """Whether the parameter has no gradient that is not in here."""
        grad = self.held.parameter.grad
        return grad is None or grad is self.gradient

    def elements(self, start: int, stop: int) -> Tensor:
        """Some of the gradient, flat."""
        flat = self.gradient.reshape(-1)
        return flat if stop - start == len(flat) else flat[start:stop]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A parameter may be saved; its way in is not a part of it."""
        return type(None), ()

    def fill_up(self) -> None:
        """What no sample of this rank used counts as zero."""
        if not self.entered:
            if self.buffered:
                self.gradient.zero_()
            else:
                self.gradient = torch.zeros_like(self.held.parameter)

    def enter(self) -> bool:
        """Make ready for a contribution; returns whether it is the first of the step."""
        self._make_ready(self)
        first, self.entered = not self.entered, True
        return first

    def add(self, gradient: Tensor) -> None:
        """Add ``gradient``."""
        if self.enter():
            self.gradient.copy_(gradient)
        else:
            self.gradient.add_(gradient)

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        """Add ``gradient`` times a scalar."""
        if self.enter():
            torch.mul(gradient, scale, out=self.gradient)
        else:
            self.gradient.addcmul_(gradient, scale)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add leftᵀ·right, computed into the buffer if that has its precision (see :mod:`shoal.model.linear`)."""
        first = self.enter()
        if self.gradient.dtype != left.dtype:
            self.gradient.copy_(left.t() @ right) if first else self.gradient.add_(left.t() @ right)
        elif first:
            torch.mm(left.t(), right, out=self.gradient)
        else:
            self.gradient.addmm_(left.t(), right)


def late(main: Main) -> ConfigError:
    """A gradient has come that nothing will take in."""
    return ConfigError(
        f"Engine: a gradient of {main.held.name} came after its unit was done: another layer uses it without holding "
        "it, or a hook kept it; make it a parameter of every layer that uses it"
    )
