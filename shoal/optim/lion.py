"""Lion (Chen et al. 2023): every element moves by the same amount, in the direction of a momentum's sign."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from shoal.config import Optimizer
from shoal.optim.rounding import Rounding
from shoal.optim.runs import Run, Work, at_once
from shoal.optim.treatment import Treatment


class Lion:
    """Updates runs in place: with c = β₁m + (1 − β₁)g, θ ← (1 − ηλ)θ − η·sign(c), then m ← β₂m + (1 − β₂)g."""

    def __init__(self, config: Optimizer, runs: Sequence[Run], rounding: Rounding) -> None:
        self._betas, self._rounding = config.lion_betas, rounding
        self._alike: dict[Treatment, list[Run]] = defaultdict(list)
        for run in runs:
            self._alike[run.treatment].append(run)

    @torch.no_grad()
    def update(self, lr: float, factor: float) -> None:
        """One step on the gradients times ``factor``. For a moment there is one more word for each parameter."""
        for treatment, runs in self._alike.items():
            for together in at_once(runs, self._rounding):
                if together:
                    self._step(together, lr * treatment.lr, treatment.weight_decay, factor)

    def _step(self, together: list[Work], lr: float, decay: float, factor: float) -> None:
        first, second = self._betas
        params, grads = [work.params for work in together], [work.grads for work in together]
        momenta = [work.run.states["exp_avg"] for work in together]
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        signs = torch._foreach_lerp(grads, momenta, first)
        torch._foreach_sign_(signs)
        torch._foreach_mul_(params, 1 - lr * decay)
        torch._foreach_add_(params, signs, alpha=-lr)
        torch._foreach_lerp_(momenta, grads, 1 - second)

    def set_steps(self, steps: int) -> None:
        """Lion counts no steps."""
