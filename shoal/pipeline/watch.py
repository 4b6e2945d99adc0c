"""Tells, during a backward pass, when it reaches each unit and when it is done with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor
from torch.utils._pytree import tree_leaves


class Watch:
    """Follows the backward pass of one micro-batch through the units of a stage, last unit first.

    ``enter(unit)`` is called before the pass computes anything of a unit, ``done(unit)`` when all gradients of its
    parameters are there. A unit that the pass does not reach, because nothing in it or before it needs a gradient, is
    entered and done when the pass is over: another rank's pass may reach it, and wait for this one.

    Autograd runs the newest nodes first: when the gradient of a unit's input is complete, so is every gradient of its
    parameters, and of all units after it; the nodes of the unit before come next. A leaf is no such input: its gradient
    is accumulated before anything else. What is recomputed inside the pass adds nodes to another graph.
    """

    def __init__(self, units: Iterable[int], enter: Callable[[int], None], done: Callable[[int], None]) -> None:
        self._units = list(units)
        self._left = self._low = len(self._units)
        """How many are not done, the first ones; and how many are not entered."""
        self._under_way = False
        self._enter, self._done = enter, done

    def follow(self, unit: int, x: object) -> bool:
        """``x``, what ``unit`` takes in, is known: in the forward pass, before the unit runs. It may be tensors in
        tuples, lists and dicts: then the first gradient says that the unit before is next, but only that one's own end
        that this one is done. Returns whether there is nothing else in it that could have gradients."""
        place = self._units.index(unit)
        if isinstance(x, Tensor):
            if x.requires_grad:
                x.register_hook(partial(self._input_done, place))
            return True
        leaves = tree_leaves(x)
        for tensor in leaves:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._input_begun, place))
        return all(leaf is None or isinstance(leaf, Tensor | int | float | str) for leaf in leaves)

    def begin(self) -> None:
        """The pass starts, from the output of the last unit. What a user's loss differentiates before is no pass."""
        self._under_way = True
        self._enter_down_to(len(self._units) - 1)

    def end(self) -> None:
        """The pass is over, where there was one."""
        self._finish(0)

    def _input_done(self, place: int, gradient: Tensor) -> None:
        if self._under_way:
            self._finish(place)
            self._enter_down_to(place - 1)

    def _input_begun(self, place: int, gradient: Tensor) -> None:
        if self._under_way:
            self._enter_down_to(place - 1)

    def _finish(self, place: int) -> None:
        """All units from the last to the one at ``place`` are done."""
        while self._left > place:
            self._enter_down_to(self._left - 1)
            self._left -= 1
            self._done(self._units[self._left])

    def _enter_down_to(self, place: int) -> None:
        while self._low > max(place, 0):
            self._low -= 1
            self._enter(self._units[self._low])
