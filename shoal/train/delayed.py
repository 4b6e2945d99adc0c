"""One process, plain PyTorch: what pipelines without a flush compute, as the recurrence that defines them.

PipeDream (Narayanan et al. 2019, 1806.03377), an update a micro-batch, u_r(t) = max(0, t − (p − 1 − r)):

    W_r^(t+1) = W_r^(t) − u_r(∇_r f(W_0^(u_0(t)), …, W_{p−1}^(u_{p−1}(t)); x_t))

With vertical sync (section 3.3) all stages use the version that the first has: u_r(t) = max(0, t − (p − 1)).

PipeDream-2BW (Narayanan et al. 2021, 2006.09503), an update a batch, W^(−1) = W^(0):

    W^(t+1) = W^(t) − u(∇f(W^(t−1); x_t))

The update u, momentum and weight decay included, acts on the newest weights; t counts from the last drain. Every
version is a whole copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from shoal.config import Optimizer
from shoal.model.decoder import Decoder
from shoal.model.loss import IGNORED
from shoal.train.reference import PlainTrainer, Reference, norm_of


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
    """Trains a materialised decoder by the recurrence.

    ``rate(step)`` scales the learning rate and ``seed`` keys dropout, as they do for :class:`PlainTrainer`. A step has
    ``updates`` updates: each of ``replicas`` has an equal part of its batch, and divides that over them in order.
    """

    def __init__(
        self,
        model: Decoder,
        config: Optimizer,
        rate: Callable[[int], float],
        seed: int,
        groups: Sequence[Delayed],
        updates: int = 1,
        replicas: int = 1,
    ) -> None:
        super().__init__(model, config, rate, seed)
        self.groups, self.updates, self.replicas = groups, updates, replicas
        self.update_number = 0
        self._versions = [self.weights()]
        """Those since the last drain: of t updates, the last is W^(t)."""

    def drain(self) -> None:
        """All updates are made: the stream begins anew from the newest weights."""
        self._versions = self._versions[-1:]

    def advance(self, batch: Mapping[str, Tensor]) -> DelayedReference:
        """One update from ``batch``: the whole batch of 2BW, a micro-batch of PipeDream (of all replicas together)."""
        self.step_number = self.update_number // self.updates
        newest = len(self._versions) - 1
        for group in self.groups:
            self._use(self._versions[max(0, newest - group.delay)], group.names)
        loss, gradients = self.gradients(batch)
        norms = [norm_of([gradients[name] for name in group.names]) for group in self.groups]
        for group, norm in zip(self.groups, norms, strict=True):
            self.clip(group.names, norm)
        self._use(self._versions[newest], tuple(gradients))
        self.update()
        self._versions.append(self.weights())
        self.update_number += 1
        return DelayedReference(loss, norm_of(gradients.values()), gradients, self._versions[-1], tuple(norms))

    def step(self, batch: Mapping[str, Tensor]) -> Reference:
        """All updates of one step. Its loss is the mean over all tokens that count, its norm the root mean square of
        the updates' norms; it has no gradients of its own."""
        shape = self.replicas, self.updates, -1
        parts = {name: one.unflatten(0, shape).transpose(0, 1) for name, one in batch.items()}
        found, counts = [], []
        for number in range(self.updates):
            micro_batch = {name: one[number].flatten(0, 1) for name, one in parts.items()}
            counts.append(int((micro_batch["labels"] != IGNORED).sum()))
            found.append(self.advance(micro_batch))
        loss = sum(one.loss * count for one, count in zip(found, counts, strict=True)) / max(1, sum(counts))
        norm = sqrt(sum(one.grad_norm**2 for one in found) / self.updates)
        return Reference(loss, norm, {}, found[-1].weights)

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
    replicas: int = 1,
    *,
    vertical: bool = False,
) -> DelayedTrainer:
    """``stage_of`` is the stage of each parameter; a step has an update for each of its ``micro_batches``. With
    ``vertical`` sync all stages use weights of one age."""
    last = max(stage_of.values())
    groups = [
        Delayed(last if vertical else last - stage, tuple(name for name, its in stage_of.items() if its == stage))
        for stage in sorted(set(stage_of.values()))
    ]
    return DelayedTrainer(model, config, rate, seed, groups, micro_batches, replicas)


def two_bw(model: Decoder, config: Optimizer, rate: Callable[[int], float], seed: int) -> DelayedTrainer:
    """A step has one update, from its whole batch; all gradients are clipped by the norm of all."""
    everything = Delayed(1, tuple(name for name, _ in model.named_parameters()))
    return DelayedTrainer(model, config, rate, seed, [everything])
