"""Lion (Chen et al. 2023): every element moves by the same amount, in the direction of a momentum's sign."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from shoal.config import Optimizer
from shoal.optim.runs import Run, at_once


class Lion:
    """Updates runs in place: with c = β₁m + (1 − β₁)g, θ ← (1 − ηλ)θ − η·sign(c), then m ← β₂m + (1 − β₂)g."""

    def __init__(self, config: Optimizer, runs: Sequence[Run]) -> None:
        self._betas, self._runs = config.lion_betas, runs

    @torch.no_grad()
    def update(self, lr: float, factor: float) -> None:
        """One step on the gradients times ``factor``. For a moment there is one more word for each parameter."""
        first, second = self._betas
        for together in at_once(self._runs):
            for treatment, alike in groupby(together, key=lambda each: each[0].treatment):
                pairs = list(alike)
                params, grads = [run.params for run, _ in pairs], [each for _, each in pairs]
                momenta = [run.states["exp_avg"] for run, _ in pairs]
                if factor != 1.0:
                    torch._foreach_mul_(grads, factor)
                signs = torch._foreach_mul(momenta, first)
                torch._foreach_add_(signs, grads, alpha=1 - first)
                torch._foreach_sign_(signs)
                rate = lr * treatment.lr
                torch._foreach_mul_(params, 1 - rate * treatment.weight_decay)
                torch._foreach_add_(params, signs, alpha=-rate)
                torch._foreach_mul_(momenta, second)
                torch._foreach_add_(momenta, grads, alpha=1 - second)

    def set_steps(self, steps: int) -> None:
        """Lion counts no steps."""
