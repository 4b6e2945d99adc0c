"""Optimizers that PyTorch lacks, or has in bfloat16 alone, one weight at a time as their papers write them.

What the engine's are compared with: nothing here is shared with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                update = (first * momentum + (1 - first) * weight.grad).sign()
                self.state[weight]["exp_avg"] = second * momentum + (1 - second) * weight.grad
                weight -= lr * (update + group["weight_decay"] * weight)


class Muon(torch.optim.Optimizer):
    """Jordan et al. 2024 with Nesterov momentum, scaled as in Liu et al. 2025."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            mu, lr = group["momentum"], group["lr"]
            for weight in group["params"]:
                buffer = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                buffer = self.state[weight]["momentum_buffer"] = mu * buffer + (1 - mu) * weight.grad
                update = newton_schulz(mu * buffer + (1 - mu) * weight.grad)
                weight *= 1 - lr * group["weight_decay"]
                weight -= lr * 0.2 * max(weight.shape) ** 0.5 * update


def newton_schulz(x: Tensor) -> Tensor:
    """Five steps of X ← aX + b(XXᵀ)X + c(XXᵀ)²X from X/‖X‖."""
    x = x / max(x.norm().item(), 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
    return x
