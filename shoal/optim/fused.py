"""PyTorch's fused optimizers, AdamW (Loshchilov & Hutter 2019) and SGD, over runs of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.config import Optimizer
from shoal.optim.rounding import Rounding
from shoal.optim.runs import Run, Work, at_once


class Fused:
    """Updates runs in place by the optimizer called ``name``, "adamw" or "sgd"."""

    def __init__(self, name: str, config: Optimizer, runs: Sequence[Run], rounding: Rounding) -> None:
        self._runs, self._rounding = runs, rounding
        self._params = {run: nn.Parameter(run.params) for run in runs}
        treatments = list(dict.fromkeys(run.treatment for run in runs))
        self._rates = [one.lr for one in treatments]
        groups = [
            {
                "params": [self._params[run] for run in runs if run.treatment == one],
                "weight_decay": one.weight_decay,
            }
            for one in treatments
        ]
        self._optimizer: Any
        if name == "adamw":
            self._optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        else:
            self._optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
        for run in runs:
            state = self._optimizer.state[self._params[run]]
            state.update(run.states)
            if name == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=run.params.device)

    def update(self, lr: float, factor: float) -> None:
        """One step on the gradients times ``factor``."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = lr * rate
        for together in at_once(self._runs, self._rounding):
            self._step(together, factor)

    def _step(self, together: list[Work], factor: float) -> None:
        """Update some runs. The fused kernels multiply gradients by ``factor`` as they read them, which saves a pass
        over memory (the attributes are those that PyTorch's GradScaler sets); they take it in float32 only, so other
        dtypes are multiplied here."""
        if not together:
            return
        optimizer = self._optimizer
        for run, params, grads in together:
            if params is not run.params:
                self._params[run].data = params
            self._params[run].grad = grads
        inside = factor not in (0.0, 1.0) and all(work.grads.dtype == torch.float32 for work in together)
        device = together[0].grads.device
        optimizer.grad_scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=device) if inside else None
        optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=device) if inside else None
        if factor != 1.0 and not inside:
            torch._foreach_mul_([work.grads for work in together], factor)
        optimizer.step()
        for run, params, _ in together:
            self._params[run].grad = None  # a run without one is left out of the next step
            if params is not run.params:
                self._params[run].data = run.params

    def set_steps(self, steps: int) -> None:
        """How many updates the states stand for (AdamW's bias correction counts them)."""
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)
