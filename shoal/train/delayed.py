"""One process, plain PyTorch: what pipelines without a flush compute, as the recurrence that defines them.

PipeDream (Narayanan et al. 2019, 1806.03377), an update a micro-batch, u_r(t) = max(0, t − (p − 1 − r)):

    W_r^(t+1) = W_r^(t) − u_r(∇_r f(W_0^(u_0(t)), …, W_{p−1}^(u_{p−1}(t)); x_t))

PipeDream-2BW (Narayanan et al. 2021, 2006.09503), an update a batch, W^(−1) = W^(0):

    W^(t+1) = W^(t) − u(∇f(W^(t−1); x_t))

The update u, momentum and weight decay included, acts on the newest weights; t counts from the last drain. Every
version is a whole copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.config import Optimizer
from shoal.model.decoder import Decoder
from shoal.model.loss import IGNORED
from shoal.train.reference import PlainTrainer, Reference


@dataclass(frozen=True)
class Delayed:
    """Parameters, by name, whose gradients are ``delay`` updates old and are clipped by their own norm."""

    delay: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class DelayedReference(Reference):
    """One update. ``loss``, ``grad_norm`` and ``gradients`` are those at the old weights."""

    norms: tuple[float, ...]
    """By group: the norm of its gradients before clipping."""


class DelayedTrainer(PlainTrainer):
    """Trains a materialised decoder by the recurrence, an update a call of ``step``.

    ``rate(step)`` scales the learning rate and ``seed`` keys dropout, as they do for :class:`PlainTrainer`; a step has
    ``updates`` updates.
    """

    def __init__(
        self,
        model: Decoder,
        config: Optimizer,
        rate: Callable[[int], float],
        seed: int,
        groups: Sequence[Delayed],
        updates: int = 1,
    ) -> None:
        super().__init__(model, config, rate, seed)
        self.groups, self.updates = groups, updates
        self.update_number = 0
        self._versions = [self._copy()]
        """Those since the last drain: of t updates, the last is W^(t)."""

    def drain(self) -> None:
        """All updates are made: the stream begins anew from the newest weights."""
        self._versions = self._versions[-1:]

    def step(self, batch: Mapping[str, Tensor]) -> DelayedReference:
        """One update from ``batch``: the whole batch of 2BW, a micro-batch of PipeDream (of all replicas together)."""
        self.step_number = self.update_number // self.updates
        self.model.train()
        t = len(self._versions) - 1
        for group in self.groups:
            self._use(self._versions[max(0, t - group.delay)], group.names)
        parameters = dict(self.model.named_parameters())
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        loss, count = self.summed_loss(batch)
        loss = loss / count
        loss.backward()
        gradients = {name: _grad(parameter).clone() for name, parameter in parameters.items()}
        norms = [_norm([gradients[name] for name in group.names]) for group in self.groups]
        for group, norm in zip(self.groups, norms, strict=True):
            if 0 < self.config.clip < norm:
                for name in group.names:
                    _grad(parameters[name]).mul_(self.config.clip / norm)
        self._use(self._versions[t], tuple(parameters))
        for weight in self._weights.values():
            weight.take_gradient()
        for optimizer in self.optimizers:
            for settings in optimizer.param_groups:
                settings["lr"] = self.config.lr * self.rate(self.step_number) * settings["share"]
            optimizer.step()
        self._versions.append(self._copy())
        self.update_number += 1
        return DelayedReference(
            loss.item(), _norm(list(gradients.values())), gradients, self._versions[-1], tuple(norms)
        )

    def summed_loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The sum of the losses of all counted tokens, and how many these are, both scalars."""
        ctx = self.model.context(batch, seed=self.seed, step=self.step_number, train=True)
        labels, ctx.labels = ctx.labels, None
        assert labels is not None
        logits = self.model(batch, ctx)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        if self.model.shape.z_loss:
            loss = loss + self.model.shape.z_loss * logits.logsumexp(-1)[labels != IGNORED].square().sum()
        return loss, (labels != IGNORED).sum().clamp(min=1)

    def _copy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def _use(self, version: Mapping[str, Tensor], names: Sequence[str]) -> None:
        for name in names:
            self.model.get_parameter(name).copy_(version[name])


def pipedream(
    model: Decoder,
    config: Optimizer,
    rate: Callable[[int], float],
    seed: int,
    stage_of: Mapping[str, int],
    micro_batches: int,
) -> DelayedTrainer:
    """``stage_of`` is the stage of each parameter; a step has ``micro_batches`` updates."""
    groups = [
        Delayed(max(stage_of.values()) - stage, tuple(name for name, its in stage_of.items() if its == stage))
        for stage in sorted(set(stage_of.values()))
    ]
    return DelayedTrainer(model, config, rate, seed, groups, micro_batches)


def two_bw(model: Decoder, config: Optimizer, rate: Callable[[int], float], seed: int) -> DelayedTrainer:
    """A step has one update, from its whole batch; all gradients are clipped by the norm of all."""
    everything = Delayed(1, tuple(name for name, _ in model.named_parameters()))
    return DelayedTrainer(model, config, rate, seed, [everything])


def _norm(gradients: Sequence[Tensor]) -> float:
    return torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
