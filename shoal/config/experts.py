"""What a model with experts may not be told."""

from __future__ import annotations

from typing import Literal, Protocol

from shoal.errors import setting

Gating = Literal["softmax", "topk-softmax", "sigmoid", "sinkhorn", "expert-choice"]

_DENSE = {
    "experts_per_token": 2,
    "expert_ffn": None,
    "shared_experts": 0,
    "dense_layers": 0,
    "gate": "softmax",
    "gate_renormalise": False,
    "gate_scale": 1.0,
    "gate_groups": 1,
    "gate_top_groups": 1,
    "bias_rate": 1e-3,
    "capacity": None,
    "balance_loss": 0.0,
    "gate_z_loss": 0.0,
}
"""Settings that only experts have, and what they are without."""


class WithExperts(Protocol):
    """The settings of a model that :func:`check_experts` looks at; see :class:`shoal.config.Model`."""

    @property
    def layers(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def ffn_bias(self) -> bool: ...
    @property
    def experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def dense_layers(self) -> int: ...
    @property
    def gate(self) -> Gating: ...
    @property
    def gate_groups(self) -> int: ...
    @property
    def gate_top_groups(self) -> int: ...


def check_experts(model: WithExperts) -> None:
    """Raise :class:`ValueError` for what does not go together."""
    if model.experts == 0:
        for name, unset in _DENSE.items():
            if (value := getattr(model, name)) != unset:
                raise ValueError(setting(name, value, "the model has no experts", "leave it out, or set experts"))
        return
    experts, k, groups, top = model.experts, model.experts_per_token, model.gate_groups, model.gate_top_groups
    if k > experts:
        raise ValueError(setting("experts_per_token", k, f"there are {experts} experts", f"use {experts} or fewer"))
    if model.dense_layers >= model.layers:
        problem, legal = f"leaves none of {model.layers} layers with experts", f"use {model.layers - 1} or fewer"
        raise ValueError(setting("dense_layers", model.dense_layers, problem, legal))
    if not model.gated or model.ffn_bias:
        name, value, legal = ("ffn_bias", True, "false") if model.gated else ("gated", False, "true")
        raise ValueError(setting(name, str(value).lower(), "experts are gated, without biases", f"use {legal}"))
    if groups > 1:
        _check_groups(model, experts // groups)
    elif top != 1:
        raise ValueError(setting("gate_top_groups", top, "there are no groups", "leave it 1, or set gate_groups"))


def _check_groups(model: WithExperts, size: int) -> None:
    experts, groups, top = model.experts, model.gate_groups, model.gate_top_groups
    if model.gate in ("sinkhorn", "expert-choice"):
        raise ValueError(setting("gate_groups", groups, f"{model.gate} has no groups", "use 1, or another gate"))
    if experts % groups:
        legal = [n for n in range(1, experts + 1) if experts % n == 0]
        raise ValueError(setting("gate_groups", groups, f"does not divide {experts} experts", f"use one of {legal}"))
    if top > groups:
        raise ValueError(setting("gate_top_groups", top, f"there are {groups} groups", f"use {groups} or fewer"))
    if (least := -(-model.experts_per_token // size)) > top:
        problem = f"{top * size} experts are fewer than the {model.experts_per_token} of a token"
        raise ValueError(setting("gate_top_groups", top, problem, f"use {least} or more"))
