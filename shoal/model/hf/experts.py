"""Layers with experts in config.json: what no single key of it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config import Model
from shoal.errors import ConfigError, setting

KEYS = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "gate_renormalise": "norm_topk_prob",
    "gate_scale": "routed_scaling_factor",
    "gate_groups": "n_group",
    "gate_top_groups": "topk_group",
}
"""Setting of a model with experts → key of config.json, where a family has one."""


def read_experts(config: Mapping[str, Any], family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, the settings that keys say one by one, as the decoder has them. Raises :class:`ConfigError` where it
    does not."""
    found, layers = dict(values), values["layers"]
    if family == "qwen3_moe":
        found["dense_layers"] = _first_dense(config, layers, values["experts"])
    if family == "deepseek_v2" and config.get("topk_method", "greedy") == "greedy":
        found |= {"gate_groups": None, "gate_top_groups": None}
    if (found.get("dense_layers") or 0) >= layers:
        return found | dict.fromkeys((*KEYS, "gate"))
    if found["experts_per_token"] is None:
        raise ConfigError(f"config.json: num_experts_per_tok is missing; a {family} model needs it")
    return found


def _first_dense(config: Mapping[str, Any], layers: int, experts: int) -> int:
    """Qwen: layers without experts may be anywhere; here they are the first."""
    every, without = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or [])
    if experts == 0:
        return layers
    if every != 1:
        problem = "layers with experts between others are not built"
        raise ConfigError(setting("decoder_sparse_step", every, problem, "it must be 1"))
    if without != set(range(len(without))):
        problem = "only first layers may be without experts"
        raise ConfigError(setting("mlp_only_layers", sorted(without), problem, "it must be [0, 1, …], or empty"))
    return len(without)


def written_experts(shape: Model, family: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """The keys that say what experts a model has, of a family that has the ``keys``."""
    if shape.experts == 0:
        dense = {key: shape.layers for field, key in keys.items() if field == "dense_layers"}
        return {"mlp_only_layers": list(range(shape.layers))} if family == "qwen3_moe" else dense
    found = {key: getattr(shape, field) for field, key in keys.items() if field in KEYS}
    found[keys.get("expert_ffn", keys["ffn"])] = shape.expert_width
    if family == "qwen3_moe":
        found |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(shape.dense_layers))}
    if family == "deepseek_v2":
        found["topk_method"] = "greedy" if shape.gate_groups == 1 else "group_limited_greedy"
    if family == "deepseek_v3":
        found["num_nextn_predict_layers"] = 0
    return found


def same_experts(shape: Model) -> dict[str, Any]:
    """One way to say what experts compute that may be said in several."""
    if shape.experts == 0:
        return {"experts_per_token": 2}
    said: dict[str, Any] = {"expert_ffn": shape.expert_width}
    if shape.dense_layers == 0:
        said["ffn"] = shape.expert_width  # nothing has that
    if shape.gate == "topk-softmax":
        said |= {"gate": "softmax", "gate_renormalise": True}
    return said
