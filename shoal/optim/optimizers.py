"""PyTorch's optimizers over flat runs of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.config import Optimizer


def state_names(config: Optimizer) -> tuple[str, ...]:
    """The state tensors of the configured optimizer, each of its parameters' shape, under PyTorch's names."""
    if config.name == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum else ()


@dataclass(frozen=True)
class Run:
    """Flat consecutive parameters with their gradients and ``states``; ``decay`` says whether weight decay acts."""

    params: Tensor
    grads: Tensor
    states: Mapping[str, Tensor]
    decay: bool


class Updater:
    """Updates flat runs of parameters in place from their gradients.

    The states are given and exist from the start, so that a checkpoint can be read straight into them.
    """

    def __init__(self, config: Optimizer, runs: Sequence[Run]) -> None:
        self._lr = config.lr
        self._optimizer: torch.optim.Optimizer | None = None
        flats = [nn.Parameter(run.params) for run in runs]
        groups = [
            {
                "params": [flat for flat, run in zip(flats, runs, strict=True) if run.decay == decay],
                "weight_decay": config.weight_decay if decay else 0.0,
            }
            for decay in (True, False)
        ]
        if not (groups := [group for group in groups if group["params"]]):
            return
        if config.name == "adamw":
            self._optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        else:
            self._optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
        for flat, run in zip(flats, runs, strict=True):
            flat.grad = run.grads
            self._optimizer.state[flat].update(run.states)
            if config.name == "adamw":
                self._optimizer.state[flat]["step"] = torch.zeros((), dtype=torch.float32)

    def update(self, rate: float) -> float:
        """One step at ``rate`` times the configured learning rate, which is returned."""
        lr = self._lr * rate
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        return lr

    def set_steps(self, steps: int) -> None:
        """How many updates the states stand for (AdamW's bias correction counts them)."""
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(steps)
