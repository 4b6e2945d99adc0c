"""Latent attention in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config import Model

KEYS = {
    "rank": "kv_lora_rank",
    "query_rank": "q_lora_rank",
    "plain_dim": "qk_nope_head_dim",
    "turned_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
"""Setting of a latent → key of config.json."""

DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def read_latent(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a latent; a key that is null is what the file says: queries without one."""
    return {"latent": {name: config.get(key, DEFAULTS[key]) for name, key in KEYS.items()}}


def written_latent(shape: Model) -> dict[str, Any]:
    """The keys for the latents of a model that has them."""
    return {} if shape.latent is None else {key: getattr(shape.latent, name) for name, key in KEYS.items()}
