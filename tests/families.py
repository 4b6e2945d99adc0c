"""A small model of each family, by its settings: sizes that two divides where they must be divided, and no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.config import Config, Model, parse
from shoal.model.decoder import Decoder

SIZES = {"layers": 3, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 27, "vocab": 61, "rope_theta": 100.0}

EXPERTS = {"experts": 8, "experts_per_token": 3, "expert_ffn": 10, "dense_layers": 1}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"kv_heads": 4, "rope_scaling": {"kind": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": {"kind": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "original_positions": 40}},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 10},
    "mixtral": {"experts": 4, "gate": "topk-softmax", "window": 5},
    "qwen3moe": {"qk_norm": True, "head_dim": 10, "experts": 6, "experts_per_token": 3, "expert_ffn": 11},
    "olmoe": {"qk_norm": True, "qk_norm_over": "all", "experts": 4},
    "mistral": {"window": 5},
    "gemma": {
        "norm": "rms-plus-one",
        "scaled_embedding": True,
        "activation": "gelu-tanh",
        "head_dim": 16,
        "kv_heads": 1,
    },
    "latent": {
        "kv_heads": 4,
        "latent": {"rank": 7, "query_rank": 9, "plain_dim": 3, "turned_dim": 4, "value_dim": 6},
        "qkv_bias": True,
        "out_bias": True,
    },
    "deepseek2": {
        "kv_heads": 4,
        "latent": {"rank": 7, "plain_dim": 5, "turned_dim": 6, "value_dim": 3},
        "rope_scaling": {"kind": "yarn", "factor": 8.0, "original_positions": 40, "mscale": 0.9, "mscale_all_dim": 0.6},
        **EXPERTS,
        "shared_experts": 2,
        "gate_scale": 3.0,
    },
    "deepseek3": {
        "kv_heads": 4,
        "latent": {"rank": 7, "query_rank": 9, "plain_dim": 3, "turned_dim": 4, "value_dim": 6},
        **EXPERTS,
        "shared_experts": 1,
        "gate": "sigmoid",
        "gate_renormalise": True,
        "gate_scale": 2.5,
        "gate_groups": 4,
        "gate_top_groups": 2,
    },
    "gpt2": {
        "norm": "layer",
        "positions": "learned",
        "max_positions": 19,
        "activation": "gelu-tanh",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "kv_heads": 4,
        "rope_theta": 10_000.0,
    },
}


def shape_of(family: str, **changes: Any) -> Model:
    """The model of a family, with ``changes``."""
    return Model(**{**SIZES, **FAMILIES[family], **changes})


def model_of(family: str) -> Decoder:
    """In float64, no vector constant and all weights large, so that every part of it matters."""
    model = Decoder(shape_of(family)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1))
    return model


def logits(model: Decoder, tokens: Tensor, **more: Tensor) -> Tensor:
    batch = {"tokens": tokens, "positions": torch.arange(tokens.shape[1])[None], **more}
    with torch.no_grad():
        return model(batch, model.context(batch))  # type: ignore[no-any-return]


def config(family: str, **changes: Any) -> Config:
    """A run of it on random tokens, thirteen of them in a sample, with ``changes`` to the model."""
    return parse(
        {
            "run": {"steps": 10},
            "model": {**SIZES, **FAMILIES[family], "dropout": 0.1, **changes},
            "data": {"source": "synthetic", "seq_len": 13, "batch": 8},
            "optimizer": {"clip": 0.5, "lr": 0.01},
            "schedule": {"warmup": 2},
        }
    )
