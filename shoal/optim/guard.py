"""What is done about gradients that are not finite: the step updates nothing, and the scale of the loss falls."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from shoal.errors import Diverged

START = 2.0**16
INTERVAL = 2000
"""Finite steps in a row after which a larger scale is tried."""


class Guard:
    """Decides, from the norm that all ranks agree on, which steps update anything.

    ``scale`` multiplies the loss before the backward pass: always 1, but under fp16 (``scaled``), whose smallest
    gradients would otherwise be zero (Micikevicius et al. 2018). There it is halved, down to 1, in a step whose
    gradients are not finite, and doubled after ``INTERVAL`` that were. ``skipped`` counts the steps that updated
    nothing; those that a smaller scale could not have saved may be ``most`` in a row.
    """

    def __init__(self, most: int, *, scaled: bool) -> None:
        self._most, self._scaled = most, scaled
        self.scale = START if scaled else 1.0
        self.skipped = self.in_a_row = self._finite = 0

    def passes(self, norm: float, scale: float | None = None) -> bool:
        """Whether a step with gradients of this norm updates anything; ``scale`` is what they were made at, where that
        may be older than the newest."""
        if not isfinite(norm):
            self.skipped, self._finite = self.skipped + 1, 0
            if (made_at := self.scale if scale is None else scale) > 1:
                self.scale = max(1.0, min(self.scale, made_at / 2))
            else:
                self.in_a_row += 1
            return False
        self.in_a_row, self._finite = 0, self._finite + 1
        if self._scaled and self._finite == INTERVAL:
            self.scale, self._finite = self.scale * 2, 0
        return True

    @property
    def exhausted(self) -> bool:
        """Whether too many steps in a row updated nothing."""
        return self.in_a_row > self._most

    def end(self, step: int, norm: float, lr: float, micro_batches: tuple[int, ...] = ()) -> Diverged | None:
        """What ends the run where that is so, after step number ``step``, counted from 1, whose gradients have this
        norm; ``lr`` is the learning rate as it is configured."""
        if not self.exhausted:
            return None
        return Diverged(
            f"step {step}: the gradient norm is {norm}; nothing was updated (step {self.in_a_row} in a row). Go on "
            f"from the last checkpoint with a lower optimizer.lr (it is {lr}) or a longer warm-up",
            step,
            micro_batches,
        )

    def state(self) -> dict[str, float]:
        """What :meth:`restore` goes on from."""
        counts: dict[str, float] = {"skipped": self.skipped, "in_a_row": self.in_a_row}
        return counts | ({"scale": self.scale, "finite": self._finite} if self._scaled else {})

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on where :meth:`state` was taken; from the start where it is empty. A scale is that of fp16 alone."""
        self.skipped, self.in_a_row = int(state.get("skipped", 0)), int(state.get("in_a_row", 0))
        if self._scaled:
            self.scale, self._finite = state.get("scale", START), int(state.get("finite", 0))
