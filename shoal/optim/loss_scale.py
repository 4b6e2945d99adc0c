"""The scale of the loss under fp16, whose smallest gradients would otherwise be zero (Micikevicius et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping

START = 2.0**16
INTERVAL = 2000
"""Finite steps in a row after which a larger scale is tried."""


class LossScale:
    """``value`` multiplies the loss before the backward pass: halved in a step whose gradients are not finite, doubled
    after ``INTERVAL`` that were; always 1 unless ``dynamic``."""

    def __init__(self, dynamic: bool) -> None:
        self._dynamic = dynamic
        self.value, self._finite = START if dynamic else 1.0, 0

    def saw(self, finite: bool) -> None:
        """A step has ended, with gradients that were finite or not: known to all ranks alike."""
        if not self._dynamic:
            return
        self._finite = self._finite + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self._finite == INTERVAL:
            self.value, self._finite = self.value * 2, 0

    def state(self) -> dict[str, float]:
        """What :meth:`restore` goes on from."""
        return {"loss_scale": self.value, "finite_steps": self._finite} if self._dynamic else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on where :meth:`state` was taken; from the start where it was taken in another precision."""
        if self._dynamic and "loss_scale" in state:
            self.value, self._finite = state["loss_scale"], int(state["finite_steps"])
