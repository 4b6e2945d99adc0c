"""Rotary positions in config.json.

Both spellings are read: ``rope_theta`` and ``rope_scaling`` of transformers 4, and ``rope_parameters`` of transformers
5, in which the base lies too. The older is written, which both versions read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config import Model, RopeScaling
from shoal.errors import ConfigError, setting

_SCALINGS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_positions",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
}
"""Of each kind its keys, and the settings that they are."""

_MAY_LACK = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}


def read_rope(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """The settings of rotary positions, with base ``theta`` where config.json has none."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", theta))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *_SCALINGS):
        known = ", ".join(("default", *_SCALINGS))
        raise ConfigError(setting("rope_type", kind, "not a kind that is built", f"one of {known}"))
    if kind == "default" or (kind == "linear" and rope.get("factor") == 1.0):
        return {"rope_theta": theta}
    keys = _SCALINGS[kind]
    if missing := [key for key in keys if key not in rope and key not in _MAY_LACK]:
        raise ConfigError(f"config.json: {missing[0]} is missing; rotary positions of type {kind} need it")
    if kind == "yarn":
        _check_yarn(rope)
    values = {name: rope[key] for key, name in keys.items() if rope.get(key) is not None}
    return {"rope_theta": theta, "rope_scaling": {"kind": kind, **values}}


def _check_yarn(rope: Mapping[str, Any]) -> None:
    for key, fine in {"attention_factor": (None,), "truncate": (None, True)}.items():
        if rope.get(key) not in fine:
            raise ConfigError(setting(key, rope[key], "yarn is built without it", "it must be absent"))
    if bool(rope.get("mscale", 0)) != bool(rope.get("mscale_all_dim", 0)) and rope.get("mscale") != 1:
        problem = "implementations differ where one of them is set"
        raise ConfigError(setting("mscale_all_dim", rope.get("mscale_all_dim"), problem, "set mscale too, or neither"))


def written_rope(shape: Model) -> dict[str, Any]:
    """The keys for the rotary positions of a model."""
    return {"rope_theta": shape.rope_theta, "rope_scaling": shape.rope_scaling and _written(shape.rope_scaling)}


def _written(scaling: RopeScaling) -> dict[str, Any]:
    kind = {"rope_type": scaling.kind, "type": scaling.kind}
    return kind | {key: getattr(scaling, name) for key, name in _SCALINGS[scaling.kind].items()}
