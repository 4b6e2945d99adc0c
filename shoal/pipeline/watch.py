"""Tells, during a backward pass, when it reaches each unit and when it is done with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor


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
        self._left = list(units)
        self._entered: int | None = None
        self._under_way = False
        self._enter, self._done = enter, done

    def follow(self, unit: int, x: object) -> None:
        """``x``, what ``unit`` takes in, is known: in the forward pass, before the unit runs."""
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(partial(self._input_done, unit))

    def begin(self) -> None:
        """The pass starts, from the output of the last unit. What a user's loss differentiates before is no pass."""
        self._under_way = True
        self._enter_next()

    def _enter_next(self) -> None:
        if self._left and self._left[-1] != self._entered:
            self._entered = self._left[-1]
            self._enter(self._entered)

    def end(self) -> None:
        """The pass is over, where there was one."""
        self._finish(-1)

    def _input_done(self, unit: int, gradient: Tensor) -> None:
        if self._under_way:
            self._finish(unit)
            self._enter_next()

    def _finish(self, unit: int) -> None:
        """All units from the last to ``unit`` are done."""
        while self._left and self._left[-1] >= unit:
            self._enter_next()
            self._done(self._left.pop())
