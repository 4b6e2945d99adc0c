"""One process, plain PyTorch, no engine: what every layout is compared with.

The model's own modules, all the logits at once, PyTorch's loss, a textbook clip and an unfused optimizer. Nothing here
is shared with the engine but the model and the initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config import Optimizer
from shoal.model.decoder import Decoder
from shoal.model.loss import IGNORED
from shoal.model.roles import logical_parts, role_of
from shoal.train.textbook import Lion, Muon

TABLES = ("embed.", "head.")


@dataclass(frozen=True)
class Reference:
    """One step of one process: ``gradients`` before clipping and ``weights`` after the update, by parameter name."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class _Weight:
    """Some rows of a parameter, as a parameter of its own in the same memory."""

    def __init__(self, parameter: nn.Parameter, rows: slice) -> None:
        self._whole, self._rows = parameter, rows
        self.parameter = nn.Parameter(parameter.detach()[rows])

    def take_gradient(self) -> None:
        self.parameter.grad = _grad(self._whole)[self._rows]


class PlainTrainer:
    """Trains a materialised decoder by the book. ``rate(step)`` scales the learning rate; ``seed`` keys dropout."""

    def __init__(self, model: Decoder, config: Optimizer, rate: Callable[[int], float], seed: int) -> None:
        self.model, self.config, self.rate, self.seed = model, config, rate, seed
        self.step_number = 0
        self.charged: list[Tensor] = []
        """What the gates add to the summed loss; it is no part of the loss that is told."""
        self.loads: dict[str, Tensor] = {}
        self._weights = dict(_logical(model))
        groups: dict[str, list[dict[str, Any]]] = {}
        for name, weight in self._weights.items():
            optimizer, lr, decay = _settings(config, name, weight.parameter.ndim)
            group = {"params": [weight.parameter], "weight_decay": decay, "share": lr}
            groups.setdefault(optimizer, []).append(group)
        self.optimizers = [_optimizer(name, config, mine) for name, mine in groups.items()]

    def step(self, batch: Mapping[str, Tensor]) -> Reference:
        """One step over the whole batch."""
        loss, gradients = self.gradients(batch)
        norm = norm_of(gradients.values())
        self.clip(gradients, norm)
        self.update()
        self.step_number += 1
        return Reference(loss, norm, gradients, self.weights())

    def drain(self) -> None:
        """End what is under way: nothing, where each step ends with its update."""

    def gradients(self, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """The mean loss of a batch and its gradients, which are copies of those of the parameters."""
        self.model.train()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        total, count = self.summed_loss(batch)
        loss = total / count.clamp(min=1)
        (loss + sum(self.charged) / count.clamp(min=1)).backward()
        return loss.item(), {name: _grad(p).clone() for name, p in self.model.named_parameters()}

    def summed_loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The sum of the losses of all tokens that count, and how many these are, both scalars."""
        ctx = self.model.context(batch, seed=self.seed, step=self.step_number, train=True)
        labels, ctx.labels = ctx.labels, None
        assert labels is not None
        logits = self.model(batch, ctx)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        if self.model.shape.z_loss:
            log_sums = logits.logsumexp(-1)[labels != IGNORED]
            loss = loss + self.model.shape.z_loss * log_sums.square().sum()
        self.charged, self.loads = list(ctx.beside.losses.values()), ctx.beside.loads
        return loss, (labels != IGNORED).sum()

    def clip(self, names: Iterable[str], norm: float) -> None:
        """Clip the gradients of the parameters called ``names``, whose norm is ``norm``."""
        if 0 < self.config.clip < norm:
            for name in names:
                _grad(self.model.get_parameter(name)).mul_(self.config.clip / norm)

    def update(self) -> None:
        """Have the optimizers apply the parameters' gradients."""
        for weight in self._weights.values():
            weight.take_gradient()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.config.lr * self.rate(self.step_number) * group["share"]
            optimizer.step()
        for name, block in self.model.named_modules():
            if (router := getattr(block, "router", None)) is not None and router.balance is not None:
                load = self.loads[name.removesuffix(".ffn")].double()
                router.balance += router.rate * (load.mean() - load).sign()

    def weights(self) -> dict[str, Tensor]:
        """Copies of all parameters, by name."""
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def norm_of(gradients: Iterable[Tensor]) -> float:
    """The norm of several gradients together."""
    return torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()


def _logical(model: Decoder) -> Iterator[tuple[str, _Weight]]:
    """Every weight under its logical name: of a fused parameter, each of its parts."""
    for name, parameter in model.named_parameters():
        owner, _, local = name.rpartition(".")
        parts = logical_parts(role_of(model.roles, owner), owner, local) or ((name, len(parameter)),)
        start = 0
        for logical, rows in parts:
            yield logical, _Weight(parameter, slice(start, start + rows))
            start += rows


def _settings(config: Optimizer, name: str, dims: int) -> tuple[str, float, float]:
    """Optimizer, share of the learning rate, and weight decay."""
    optimizer, decay = config.name, config.weight_decay if dims > 1 else 0.0
    if optimizer == "muon" and (dims != 2 or name.startswith(TABLES)):
        optimizer = "adamw"
    for group in config.groups:
        if fnmatchcase(name, group.match):
            return group.name or optimizer, group.lr, decay if group.weight_decay is None else group.weight_decay
    return optimizer, 1.0, decay


def _optimizer(name: str, config: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    match name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)
        case "lion":
            return Lion(groups, config.lr, config.lion_betas)
        case "muon":
            return Muon(groups, config.lr, config.muon_momentum)
        case _:
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=False)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
