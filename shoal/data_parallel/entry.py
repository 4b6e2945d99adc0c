"""The one way in for gradients, from autograd or from a linear map that makes them where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shoal.data_parallel.buckets import Slot
from shoal.data_parallel.flat import Flat
from shoal.errors import ConfigError
from shoal.meter import mark
from shoal.model import own_grad
from shoal.model.own_grad import Contribution as Contribution  # what entries are made of
from shoal.model.own_grad import Deferred
from shoal.purposes import GRADIENTS

_NONE = torch.empty(0)
"""In place of a gradient that there is not yet."""


class Later(Deferred):
    """Contributions that are not entered at once: those that are to be made later, and the one that is on its way from
    other ranks while the backward pass goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._coming: Contribution | None = None

    def expect(self, contribution: Contribution) -> None:
        """One is under way, and the one before has had its time."""
        self.settle()
        self._coming = contribution

    def settle(self) -> None:
        """Nothing is under way any more."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming()

    def forget(self) -> None:
        """Nobody waits for what was under way when a step failed."""
        self._coming = None


class Main:
    """The way in for the gradient of one parameter of bucket number ``bucket``. It is kept in ``gradient``, which
    subclasses place; ``buffered`` says that it is a part of the bucket's buffer. ``make_ready`` is called before a
    contribution enters."""

    buffered = True

    def __init__(
        self, slot: Slot, bucket: int, gradient: Tensor, make_ready: Callable[[Main], None], later: Later
    ) -> None:
        self._slot, self.held, self.bucket, self.gradient = slot, slot.held, bucket, gradient
        self.entered = False
        """Whether a contribution of this step is in ``gradient``; before, that holds what an earlier one left."""
        self._make_ready, self._later = make_ready, later

    def begin(self) -> None:
        """A step begins: there is no gradient."""
        self.entered, self.held.parameter.grad = False, None

    def complete(self) -> None:
        """Every contribution of the step has come. What still came would lie in ``grad``, where it is found."""
        self.held.parameter.grad = None

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
        raise NotImplementedError

    def enter(self) -> bool:
        """Make ready for a contribution; returns whether it is the first of the step."""
        self._make_ready(self)
        first, self.entered = not self.entered, True
        return first

    def swap(self, buffer: Tensor) -> None:
        """The gradients of another batch are in view, and ``buffer`` is the bucket's."""
        raise NotImplementedError

    def served(self) -> None:
        """The optimizer needs the gradient no more."""

    def later(self, contribution: Contribution) -> bool:
        """Whether ``contribution`` waits now."""
        return self._later.keep(contribution)

    def add_arriving(self, arrive: Callable[[], Tensor]) -> None:
        """Add what ``arrive`` returns (given up) before the next one comes, or the backward pass leaves the unit."""
        self._later.expect(lambda: self.add(arrive()))

    def add(self, gradient: Tensor) -> None:
        """Add ``gradient`` (given up)."""
        raise NotImplementedError

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        """Add ``gradient`` times a scalar."""
        raise NotImplementedError

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add leftᵀ·right, now or later (see :mod:`shoal.model.linear`)."""
        if not self.later(partial(self._add_product, left, right)):
            self._add_product(left, right)

    def _add_product(self, left: Tensor, right: Tensor) -> None:
        raise NotImplementedError


class InBuffer(Main):
    """A gradient in its bucket's buffer."""

    _aside: Tensor | None = None

    def swap(self, buffer: Tensor) -> None:
        view = self._slot.of(buffer) if self._aside is None else self._aside
        self.gradient, self._aside = view, self.gradient

    def fill_up(self) -> None:
        if not self.entered:
            self.gradient.zero_()

    def add(self, gradient: Tensor) -> None:
        if self.enter():
            self.gradient.copy_(gradient)
        else:
            self.gradient.add_(gradient)

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        if self.enter():
            torch.mul(gradient, scale, out=self.gradient)
        else:
            self.gradient.addcmul_(gradient, scale)

    def _add_product(self, left: Tensor, right: Tensor) -> None:
        """Computed into the buffer, if that has the product's precision."""
        first = self.enter()
        if self.gradient.dtype != left.dtype:
            self.gradient.copy_(left.t() @ right) if first else self.gradient.add_(left.t() @ right)
        elif first:
            torch.mm(left.t(), right, out=self.gradient)
        else:
            self.gradient.addmm_(left.t(), right)


class AsMade(Main):
    """A gradient that nobody shares: the tensor that autograd or the first contribution has made, which saves a pass
    over memory. Until it is complete it is the parameter's ``grad`` (:mod:`shoal.model.own_grad`)."""

    buffered = False
    _aside = _NONE

    def __init__(
        self, slot: Slot, bucket: int, gradient: Tensor, make_ready: Callable[[Main], None], later: Later
    ) -> None:
        super().__init__(slot, bucket, gradient, make_ready, later)
        self.held.parameter.register_post_accumulate_grad_hook(_made)

    def swap(self, buffer: Tensor) -> None:
        self.gradient, self._aside = self._aside, self.gradient

    def begin(self) -> None:
        super().begin()
        self.served()

    def served(self) -> None:
        self.gradient = _NONE

    def complete(self) -> None:
        if (grad := self.held.parameter.grad) is not None:
            self.gradient, self.entered = grad, True
        super().complete()

    def fill_up(self) -> None:
        if not self.entered:
            self.gradient = torch.zeros_like(self.held.parameter)

    def add(self, gradient: Tensor) -> None:
        self._make_ready(self)
        own_grad.add(self.held.parameter, gradient)
        _made(self.held.parameter)

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        self._make_ready(self)
        own_grad.add_scaled(self.held.parameter, gradient, scale)
        _made(self.held.parameter)

    def _add_product(self, left: Tensor, right: Tensor) -> None:
        self._make_ready(self)
        own_grad.add_product(self.held.parameter, left, right)
        _made(self.held.parameter)


def _made(parameter: Tensor) -> None:
    """Say what the gradient is that a parameter now has."""
    if parameter.grad is not None:
        mark(GRADIENTS, parameter.grad)


def main_of(slot: Slot, bucket: int, flat: Flat, make_ready: Callable[[Main], None], later: Later) -> Main:
    """The way in for the parameter in a slot of ``flat``."""
    if flat.buffered:
        return InBuffer(slot, bucket, slot.of(flat.grads), make_ready, later)
    return AsMade(slot, bucket, _NONE, make_ready, later)


def late(main: Main) -> ConfigError:
    """A gradient has come that nothing will take in."""
    return ConfigError(
        f"Engine: a gradient of {main.held.name} came after its unit was done: another layer uses it without holding "
        "it, or a hook kept it; make it a parameter of every layer that uses it"
    )


def take_in(mains: Sequence[Main]) -> None:
    """Take in what a backward pass has left as parameters' ``grad``."""
    first: tuple[list[Tensor], list[Tensor]] = ([], [])
    later: tuple[list[Tensor], list[Tensor]] = ([], [])
    for main in mains:
        gradient = main.held.parameter.grad
        if main.buffered and gradient is not None and not main.settled:
            into, what = first if main.enter() else later
            into.append(main.gradient)
            what.append(gradient)
    if first[0]:
        torch._foreach_copy_(*first)
    if later[0]:
        torch._foreach_add_(*later)
    for main in mains:  # what comes besides autograd adds in place, while the cache has it
        if main.buffered:
            alike = main.gradient.dtype == main.held.parameter.dtype
            main.held.parameter.grad = main.gradient if main.entered and alike else None
