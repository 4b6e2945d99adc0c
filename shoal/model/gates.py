"""Gates: which tokens go to which experts, and by what weights they come back.

Pure functions of a gate's scores. What chooses looks at whole sequences, each by itself, so that the choice is the same
however samples, positions and micro-batches are divided. The weights of a token follow from its own scores and what was
chosen for it.

Axes in names: S sequences, T positions, E experts, N tokens.

=============  =======================================  ======================================  =======================
gate           chosen                                   weights                                 source
=============  =======================================  ======================================  =======================
softmax        the k largest                            softmax over all experts                Fedus et al. 2022
topk-softmax   the k largest                            softmax over the chosen                 Mixtral, 2024
sigmoid        the k largest of sigmoid + bias          sigmoid                                 DeepSeek-V3, 2024
sinkhorn       the k largest after balancing            sigmoid (k = 1), softmax over all       Clark et al. 2022
expert-choice  by each expert, its share of the tokens  softmax over all experts                Zhou et al. 2022
=============  =======================================  ======================================  =======================
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor

from shoal.config import Model as Shape
from shoal.config_experts import Gating

SINKHORN_ROUNDS = 8
"""A fixed number: one that depends on the scores would be another for another division of the sequences."""


@dataclass(frozen=True)
class Gate:
    """A gate's settings: see :class:`shoal.config.Model`. ``chosen`` is k."""

    kind: Gating
    experts: int
    chosen: int
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    capacity: float | None = None

    @classmethod
    def of(cls, shape: Shape) -> Gate:
        """That of a model."""
        return cls(
            shape.gate,
            shape.experts,
            shape.experts_per_token,
            shape.gate_renormalise,
            shape.gate_scale,
            shape.gate_groups,
            shape.gate_top_groups,
            shape.capacity,
        )

    @property
    def looks_around(self) -> bool:
        """Whether what a token is given depends on the other tokens of its sequence."""
        return self.capacity is not None or self.kind in ("sinkhorn", "expert-choice")

    def places(self, length: int) -> int:
        """How many tokens of a sequence of ``length`` an expert takes."""
        if self.capacity is None and self.kind != "expert-choice":
            return length
        return min(length, ceil((self.capacity or 1.0) * self.chosen * length / self.experts))

    def even_share(self, length: int) -> Fraction:
        """Which part of the tokens of sequences of ``length`` goes to each expert where all are given as many."""
        places = Fraction(self.places(length), length)
        return places if self.kind == "expert-choice" else min(places, Fraction(self.chosen, self.experts))


def widened(scores: Tensor) -> Tensor:
    """In float32 at least."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


@torch.no_grad()
def choose(scores_STE: Tensor, gate: Gate, bias_E: Tensor | None = None) -> Tensor:
    """Which experts each token is given, bool [S, T, E], before any is dropped."""
    scores_STE = widened(scores_STE)
    if gate.kind == "expert-choice":
        most = scores_STE.softmax(-1).topk(gate.places(scores_STE.shape[1]), dim=1).indices
        return torch.zeros_like(scores_STE, dtype=torch.bool).scatter_(1, most, True)
    if gate.kind == "sinkhorn":
        scores_STE = sinkhorn(scores_STE)
    if gate.kind == "sigmoid":
        scores_STE = scores_STE.sigmoid()
        if bias_E is not None:
            scores_STE = scores_STE + bias_E.to(scores_STE)
    if gate.groups > 1:
        scores_STE = _within_groups(scores_STE, gate)
    most = scores_STE.topk(gate.chosen, dim=-1).indices
    return torch.zeros_like(scores_STE, dtype=torch.bool).scatter_(-1, most, True)


def _within_groups(scores_STE: Tensor, gate: Gate) -> Tensor:
    """Only what is in the best groups: by their best expert (DeepSeek-V2), or, where a bias balances experts, by the
    sum of their best two (DeepSeek-V3)."""
    by_group = scores_STE.unflatten(-1, (gate.groups, -1))
    best = 2 if gate.kind == "sigmoid" and by_group.shape[-1] > 1 else 1
    groups = by_group.topk(best, dim=-1).values.sum(-1).topk(gate.top_groups, dim=-1).indices
    open_ = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=groups.device).scatter_(-1, groups, True)
    within: Tensor = by_group.masked_fill(~open_[..., None], -torch.inf).flatten(-2)
    return within


def sinkhorn(scores_STE: Tensor) -> Tensor:
    """exp(scores) with rows and columns scaled in turn, so that in each sequence every token has 1/T of all and every
    expert nearly 1/E (Sinkhorn & Knopp 1967)."""
    found = (scores_STE - scores_STE.amax(-1, keepdim=True)).exp()
    for _ in range(SINKHORN_ROUNDS):
        found = found / found.sum(1, keepdim=True).mul_(found.shape[2])
        found = found / found.sum(2, keepdim=True).mul_(found.shape[1])
    return found


@torch.no_grad()
def keep(chosen_STE: Tensor, gate: Gate) -> Tensor:
    """What is left of the choice when every expert takes only the first tokens of a sequence, as many as it has places:
    bool [S, T, E]."""
    if gate.capacity is None or gate.kind == "expert-choice":
        return chosen_STE
    return chosen_STE & (chosen_STE.cumsum(1) <= gate.places(chosen_STE.shape[1]))


def weigh(scores_NE: Tensor, chosen_NE: Tensor, gate: Gate) -> Tensor:
    """By what the outputs of the experts chosen are multiplied, [N, E] in float32 at least; zero for the others."""
    scores_NE = widened(scores_NE)
    if gate.kind == "topk-softmax":  # over all experts, of which the others then have no part
        weights_NE = scores_NE.softmax(-1) * chosen_NE
        weights_NE = weights_NE / weights_NE.sum(-1, keepdim=True)
    elif gate.kind == "sigmoid" or (gate.kind == "sinkhorn" and gate.chosen == 1):
        weights_NE = scores_NE.sigmoid() * chosen_NE
    else:
        weights_NE = scores_NE.softmax(-1) * chosen_NE
    if gate.renormalise and gate.kind in ("softmax", "sigmoid"):
        weights_NE = weights_NE / weights_NE.sum(-1, keepdim=True).clamp(min=1e-20)
    return weights_NE * gate.scale


def balance_loss(scores_STE: Tensor, chosen_STE: Tensor, gate: Gate) -> Tensor:
    """E · Σ_e (share of the choices that fell on e) · (mean probability of e), of each sequence: [S]. 1 where load is
    even (Fedus et al. 2022; for each sequence: DeepSeek-V2). Of sigmoids, probabilities are shares of their sum."""
    scores_STE = widened(scores_STE)
    if gate.kind == "sigmoid":
        found = scores_STE.sigmoid()
        probabilities_STE = found / found.sum(-1, keepdim=True)
    else:
        probabilities_STE = scores_STE.softmax(-1)
    counts_SE = chosen_STE.sum(1)
    shares_SE = counts_SE.to(probabilities_STE.dtype) / counts_SE.sum(-1, keepdim=True)
    return gate.experts * (shares_SE * probabilities_STE.mean(1)).sum(-1)


def z_loss(scores_STE: Tensor) -> Tensor:
    """log²Σ_e exp(scores), on average over each sequence: [S] (ST-MoE, Zoph et al. 2022)."""
    return widened(scores_STE).logsumexp(-1).square().mean(-1)
