"""config.json and the model section, both ways."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import Model, RopeScaling
from shoal.errors import ConfigError
from shoal.model.hf import FAMILIES, read_model, write_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 50,
    "vocab_size": 99,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 99}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 50, "vocab": 99}


LATENT: dict[str, Any] = {"kv_heads": 4, "latent": {"rank": 6, "plain_dim": 5, "turned_dim": 4, "value_dim": 3}}


def of(family: str, **options: Any) -> dict[str, Any]:
    return {**(GPT2 if family == "gpt2" else LLAMA), "model_type": family, **options}


def test_what_a_file_leaves_out_is_what_the_family_has() -> None:
    assert read_model(LLAMA) == Model(**SIZES, norm_eps=1e-6)
    assert read_model(of("qwen2")) == Model(**SIZES, norm_eps=1e-6, qkv_bias=True)
    assert read_model(of("qwen3")) == Model(**SIZES, norm_eps=1e-6, head_dim=128, qk_norm=True)
    assert read_model(of("mistral")) == Model(**SIZES, norm_eps=1e-6, window=4096)
    assert read_model(of("gemma")) == Model(
        **SIZES, norm_eps=1e-6, head_dim=256, tied=True, norm="rms-plus-one", scaled_embedding=True,
        activation="gelu-tanh",
    )  # fmt: skip
    assert read_model(GPT2) == Model(
        layers=2, hidden=32, heads=4, ffn=128, vocab=99, tied=True, norm="layer", positions="learned",
        activation="gelu-tanh", gated=False, qkv_bias=True, out_bias=True, ffn_bias=True,
    )  # fmt: skip
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read_model(without).kv_heads == 4
    assert read_model({**without, "model_type": "mistral", "num_attention_heads": 16}).kv_heads == 8


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param({"rope_theta": 5e5, "rope_scaling": LLAMA3}, id="transformers 4"),
        pytest.param({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, id="transformers 5"),
        pytest.param({"rope_parameters": LLAMA3, "rope_theta": 5e5, "rope_scaling": None}, id="both"),
    ],
)
def test_both_spellings_of_rotary_positions_are_read(spelling: dict[str, Any]) -> None:
    scaling = RopeScaling(kind="llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_positions=8192)
    model = read_model({**LLAMA, **spelling})
    assert (model.rope_theta, model.rope_scaling) == (5e5, scaling)
    written = write_config(model, {**LLAMA, **spelling})
    assert (written["rope_theta"], written["rope_scaling"]) == (5e5, {**LLAMA3, "type": "llama3"})
    assert "rope_parameters" not in written, "transformers 4 would not see it, and 5 reads the older keys"


def test_linear_scaling_by_its_old_name_and_none_at_all() -> None:
    scaled = read_model({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert scaled.rope_scaling == RopeScaling(kind="linear", factor=4)
    for rope in (None, {"rope_type": "default"}, {"type": "linear", "factor": 1.0}):
        assert read_model({**LLAMA, "rope_scaling": rope}).rope_scaling is None


@pytest.mark.parametrize(
    ("kinds", "first", "window"),
    [(None, 0, 7), (None, 2, None), (["full_attention"] * 2, 0, None), (["sliding_attention"] * 2, 9, 7)],
)
def test_qwen_has_a_window_in_all_layers_or_in_none(kinds: list[str] | None, first: int, window: int | None) -> None:
    config = of("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=first, layer_types=kinds)
    assert read_model(config).window == window
    assert read_model(write_config(read_model(config), config)).window == window
    assert read_model({**config, "use_sliding_window": False}).window is None


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh"])
def test_gemma_computes_the_approximation_whatever_it_calls_it(name: str) -> None:
    assert read_model(of("gemma", hidden_act=name)).activation == "gelu-tanh"
    assert read_model(of("llama", hidden_act="gelu")).activation == "gelu"


@pytest.mark.parametrize(
    ("options", "key", "says"),
    [
        ({"model_type": "lama"}, "model_type = lama", "did you mean 'llama'"),
        ({"model_type": "mamba"}, "model_type = mamba", "llama, mistral, qwen2, qwen3, gemma, gpt2"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0", "absent"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0", "absent"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "absent"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5", "1"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "of one kind"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type = longrope", "linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "original_max_position_embeddings", "missing"),
        ({"rope_scaling": YARN | {"attention_factor": 1.5}}, "attention_factor = 1.5", "absent"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate = False", "absent"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 0.7}}, "mscale_all_dim = 0.7", "mscale too"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta = 1.0", "above 1"),
        (of("mixtral", router_jitter_noise=0.1), "router_jitter_noise = 0.1", "0"),
        (of("qwen3_moe", decoder_sparse_step=2), "decoder_sparse_step = 2", "1"),
        (of("qwen3_moe", mlp_only_layers=[1]), "mlp_only_layers = [1]", "empty"),
        (of("olmoe", clip_qkv=8.0), "clip_qkv = 8.0", "absent"),
        (of("deepseek_v2", norm_topk_prob=True), "norm_topk_prob = True", "False"),
        (of("deepseek_v2", topk_method="noaux_tc"), "topk_method = noaux_tc", "greedy or group_limited_greedy"),
        (of("deepseek_v2", num_experts_per_tok=None), "num_experts_per_tok", "missing"),
        (of("deepseek_v3", scoring_func="softmax"), "scoring_func = softmax", "sigmoid"),
        (of("deepseek_v3", rope_interleave=False), "rope_interleave = False", "True"),
        (of("deepseek_v3", moe_layer_freq=2), "moe_layer_freq = 2", "1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor", "missing"),
        ({"hidden_act": "relu2"}, "hidden_act = relu2", "silu"),
        ({"hidden_size": None}, "hidden_size", "missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0", "greater than or equal to 1"),
        ({"num_attention_heads": 5}, "hidden = 32", "heads (5)"),
        ({"rope_scaling": [3]}, "config.json", "wrong type"),
        ({"hidden_act": ["silu"]}, "config.json", "wrong type"),
        ({"vocab_size": "many"}, "vocab_size = many", "integer"),
        ({"model_type": ["llama"]}, "model_type", "it knows llama"),
        ({"layer_types": 1}, "config.json", "wrong type"),
        (of("gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx = True", "False"),
        (of("gpt2", scale_attn_weights=False), "scale_attn_weights = False", "True"),
        (of("qwen2", use_sliding_window=True, max_window_layers=1), "max_window_layers = 1", "0, or 2"),
    ],
)
def test_what_the_decoder_cannot_be_is_refused_by_name(options: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_model({**LLAMA, **options})
    assert key in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("choices", "family"),
    [
        ({}, "llama"),
        ({"qkv_bias": True, "out_bias": True}, "llama"),
        ({"window": 9}, "mistral"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qkv_bias": True, "window": 9}, "qwen2"),
        ({"qk_norm": True, "head_dim": 16}, "qwen3"),
        ({"norm": "rms-plus-one", "scaled_embedding": True, "activation": "gelu-tanh"}, "gemma"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0, "original_positions": 64}}, "llama"),
        ({"experts": 4, "gate": "topk-softmax"}, "mixtral"),
        ({"qk_norm": True, "experts": 4, "expert_ffn": 9, "dense_layers": 1}, "qwen3_moe"),
        ({"qk_norm": True, "qk_norm_over": "all", "experts": 4}, "olmoe"),
        ({**LATENT, "qkv_bias": True, "out_bias": True}, "deepseek_v2"),
        ({**LATENT, "experts": 4, "expert_ffn": 9, "gate_groups": 2, "shared_experts": 1}, "deepseek_v2"),
        ({**LATENT, "experts": 4, "expert_ffn": 9, "gate": "sigmoid", "dense_layers": 1}, "deepseek_v3"),
    ],
)
def test_a_model_from_nothing_is_of_the_first_family_that_can_say_it(choices: dict[str, Any], family: str) -> None:
    model = Model(**{**SIZES, **choices}, dropout=0.1, z_loss=1e-4)
    config = write_config(model, positions=77)
    assert config["model_type"] == family
    assert config["architectures"] == [FAMILIES[family].architecture]
    assert config["max_position_embeddings"] == 77
    assert read_model(config) == model.model_copy(update={"dropout": 0.0, "z_loss": 0.0})


def test_experts_that_are_described_in_two_ways_are_the_same() -> None:
    model = Model(**SIZES, experts=4, expert_ffn=9, gate="softmax", gate_renormalise=True, balance_loss=0.01)
    config = write_config(model)
    assert (config["model_type"], config["intermediate_size"]) == ("mixtral", 9)
    assert read_model(config) == Model(**{**SIZES, "ffn": 9}, experts=4, gate="topk-softmax")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
        ("qwen3_moe", {"num_experts": 0}),
        ("deepseek_v2", {"first_k_dense_replace": 2, "num_experts_per_tok": 2, "num_key_value_heads": None}),
        ("deepseek_v3", {"first_k_dense_replace": 3, "num_key_value_heads": 4}),
    ],
)
def test_a_family_with_experts_may_have_a_model_without(family: str, options: dict[str, Any]) -> None:
    model = read_model(of(family, **options))
    assert (model.experts, model.gate, model.dense_layers) == (0, "softmax", 0)
    again = read_model(write_config(model, of(family, **options)))
    assert again == model


def test_groups_of_experts_count_where_the_gate_looks_at_them() -> None:
    options = {"num_experts_per_tok": 2, "num_key_value_heads": 4, "n_group": 8, "topk_group": 3}
    assert read_model(of("deepseek_v2", **options)).gate_groups == 1
    grouped = read_model(of("deepseek_v2", **options, topk_method="group_limited_greedy"))
    assert (grouped.gate_groups, grouped.gate_top_groups) == (8, 3)
    assert write_config(grouped, of("deepseek_v2"))["topk_method"] == "group_limited_greedy"


def test_a_model_that_no_family_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="no family of Hugging Face models has this combination"):
        write_config(Model(**SIZES, experts=4, shared_experts=1))
    with pytest.raises(ConfigError, match="no family of Hugging Face models has this combination"):
        write_config(Model(**SIZES, norm="layer"))


def test_what_else_the_first_config_said_stays() -> None:
    base = {**LLAMA, "bos_token_id": 5, "max_position_embeddings": 131072, "initializer_range": 0.01}
    written = write_config(read_model(base), base)
    assert {key: written[key] for key in base} == base
    changed = write_config(read_model(base).model_copy(update={"window": 8}), base)
    assert changed["model_type"] == "mistral"
