"""PyTorch's optimizers over runs of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """A tensor of parameters, ``states`` and gradients that lie in it alike; ``decay`` says whether weight decay acts.

    ``grads()`` is asked for at each update, as it need not be the same memory each time.
    """

    params: Tensor
    grads: Callable[[], Tensor]
    states: Mapping[str, Tensor]
    decay: bool


class Updater:
    """Updates runs of parameters in place from their gradients.

    The states are given and exist from the start, so that a checkpoint can be read straight into them.
    """

    def __init__(self, config: Optimizer, runs: Sequence[Run]) -> None:
        self._lr, self._runs = config.lr, runs
        self._optimizer: torch.optim.Optimizer | None = None
        self._params = flats = [nn.Parameter(run.params) for run in runs]
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
            self._optimizer.state[flat].update(run.states)
            if config.name == "adamw":
                self._optimizer.state[flat]["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)

    def update(self, rate: float, factor: float = 1.0) -> float:
        """One step on the gradients times ``factor``, at ``rate`` times the configured learning rate, which is
        returned."""
        lr = self._lr * rate
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            for together in self._at_once():
                self._step(self._optimizer, together, factor)
        return lr

    def _at_once(self) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
        """All runs with their gradients; but those whose gradients are in lower precision one by one, as each needs a
        copy."""
        given = [(params, run.grads()) for params, run in zip(self._params, self._runs, strict=True)]
        yield [(params, grads) for params, grads in given if grads.dtype == params.dtype]
        for params, grads in given:
            if grads.dtype != params.dtype:
                yield [(params, grads.to(params.dtype))]

    def _step(self, optimizer: Any, together: list[tuple[nn.Parameter, Tensor]], factor: float) -> None:
        """Update some runs. The fused kernels multiply gradients by ``factor`` as they read them, which saves a pass
        over memory (the attributes are those that PyTorch's GradScaler sets); they take it in float32 only, so other
        dtypes are multiplied here."""
        if not together:
            return
        for params, grads in together:
            params.grad = grads
        inside = factor not in (0.0, 1.0) and all(grads.dtype == torch.float32 for _, grads in together)
        device = together[0][1].device
        optimizer.grad_scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=device) if inside else None
        optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=device) if inside else None
        if factor != 1.0 and not inside:
            torch._foreach_mul_([grads for _, grads in together], factor)
        optimizer.step()
        for params, _ in together:
            params.grad = None  # a run without one is left out of the next step

    def set_steps(self, steps: int) -> None:
        """How many updates the states stand for (AdamW's bias correction counts them)."""
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(steps)
