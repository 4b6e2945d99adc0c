"""One process, plain PyTorch, no engine: what every layout is compared with.

The model's own modules, all the logits at once, PyTorch's loss, a textbook clip and an unfused optimizer. Nothing here
is shared with the engine but the model and the initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config import Optimizer
from shoal.model.decoder import Decoder
from shoal.model.loss import IGNORED


@dataclass(frozen=True)
class Reference:
    """One step of one process: ``gradients`` before clipping and ``weights`` after the update, by parameter name."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class PlainTrainer:
    """Trains a materialised decoder by the book. ``rate(step)`` scales the learning rate; ``seed`` keys dropout."""

    def __init__(self, model: Decoder, config: Optimizer, rate: Callable[[int], float], seed: int) -> None:
        self.model, self.config, self.rate, self.seed = model, config, rate, seed
        self.step_number = 0
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        if config.name == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False
            )
        else:
            self.optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=False)

    def step(self, batch: Mapping[str, Tensor]) -> Reference:
        """One step over the whole batch."""
        self.model.train()
        ctx = self.model.context(batch, seed=self.seed, step=self.step_number, train=True)
        labels, ctx.labels = ctx.labels, None
        assert labels is not None
        logits = self.model(batch, ctx)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        if self.model.shape.z_loss:
            log_sums = logits.logsumexp(-1)[labels != IGNORED]
            loss = loss + self.model.shape.z_loss * log_sums.square().sum()
        loss = loss / (labels != IGNORED).sum().clamp(min=1)
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        gradients = {name: _grad(p).clone() for name, p in self.model.named_parameters()}
        norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt().item()
        if 0 < self.config.clip < norm:
            for parameter in self.model.parameters():
                _grad(parameter).mul_(self.config.clip / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * self.rate(self.step_number)
        self.optimizer.step()
        self.step_number += 1
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return Reference(loss.item(), norm, gradients, weights)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
