"""One process, plain PyTorch: what parameter servers compute that are S steps behind (stale synchronous parallel, Ho et
al. 2013), and that make of the replicas' gradients g_r something else than the mean over all tokens.

    W^(t+1) = W^(t) − u(g(W^(max(0, t−S)); x_t)),   g = ∇f, Σ_r g_r or max_r g_r

Each g_r is the gradient of the mean over the tokens of replica r; the largest is taken element by element. With S = 0
and the mean it is :class:`~shoal.train.reference.PlainTrainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from shoal.config import Optimizer
from shoal.model.decoder import Decoder
from shoal.train.delayed import Delayed, DelayedTrainer
from shoal.train.reference import Reference

_JOIN = {"sum": lambda terms: terms.sum(0), "max": lambda terms: terms.amax(0)}


class ServedTrainer(DelayedTrainer):
    """Trains a materialised decoder by the recurrence, with gradients that are ``stale`` steps old. Each of
    ``replicas`` has an equal part of a batch, in order; ``reduce`` is "mean", "sum" or "max"."""

    def __init__(
        self,
        model: Decoder,
        config: Optimizer,
        rate: Callable[[int], float],
        seed: int,
        stale: int,
        reduce: str = "mean",
        replicas: int = 1,
    ) -> None:
        everything = Delayed(stale, tuple(name for name, _ in model.named_parameters()))
        super().__init__(model, config, rate, seed, [everything], replicas=replicas)
        self._stale, self._reduce = stale, reduce

    def step(self, batch: Mapping[str, Tensor]) -> Reference:
        """One step, with its gradients where they are those of the newest weights."""
        found = self.advance(batch)
        return replace(found, gradients={}) if self._stale else found

    def gradients(self, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """The mean loss of a batch, and what the servers make of the gradients of its parts, which is left in the
        parameters, too."""
        loss, mean = super().gradients(batch)
        if self._reduce == "mean":
            return loss, mean
        terms = []
        for replica in range(self.replicas):
            part = {name: one.chunk(self.replicas)[replica] for name, one in batch.items()}
            terms.append(super().gradients(part)[1])
        joined = {name: _JOIN[self._reduce](torch.stack([term[name] for term in terms])) for name in mean}
        for name, parameter in self.model.named_parameters():
            parameter.grad = joined[name].clone()
        return loss, joined
