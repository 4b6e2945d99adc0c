"""The families of Hugging Face models that the decoder can be, each as data: its sizes' keys and its modules' names.

The names of a family map a module of the decoder to the module of theirs that holds its tensors, ``*`` being the number
of a block, and a second one that of an expert; the last word of a tensor's name (weight, bias) is the same in both, or
the whole name is there. Where several modules map to one, it stacks them in this order along the output dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ConfigError, nearest, setting
from shoal.model.hf import experts, latent

ANY = "any"
HEAD = "lm_head"


@dataclass(frozen=True)
class Family:
    """One family, called ``name`` in ``model_type``.

    ``keys``       setting of the model section → key of config.json
    ``spelled``    another spelling of a key, which files may have instead
    ``defaults``   what a key is where config.json leaves it out; one without a default is required
    ``fixed``      settings that every model of the family has
    ``names``      module of the decoder → module of theirs
    ``prefix``     what all their modules but the head begin with; files may leave it out
    ``only``       keys that change what a model computes in a way that this one cannot, with the values that do not
    ``latent``     whether attention is latent attention
    ``pairs``      whether rotary features are pairs side by side
    ``further``    whether files may have layers after the last, which predict further tokens and are left out
    ``transposed`` last words of modules whose matrices are [in, out]
    ``ignored``    tensors that files may have and nothing needs: tables that are computed
    """

    name: str
    architecture: str
    keys: Mapping[str, str]
    names: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model."
    latent: bool = False
    pairs: bool = False
    further: bool = False
    transposed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)


_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
}
_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
_NAMES = {
    "embed.table": "model.embed_tokens",
    "blocks.*.attn_norm": "model.layers.*.input_layernorm",
    "blocks.*.attn.q": "model.layers.*.self_attn.q_proj",
    "blocks.*.attn.k": "model.layers.*.self_attn.k_proj",
    "blocks.*.attn.v": "model.layers.*.self_attn.v_proj",
    "blocks.*.attn.q_norm": "model.layers.*.self_attn.q_norm",
    "blocks.*.attn.k_norm": "model.layers.*.self_attn.k_norm",
    "blocks.*.attn.out": "model.layers.*.self_attn.o_proj",
    "blocks.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blocks.*.ffn.gate": "model.layers.*.mlp.gate_proj",
    "blocks.*.ffn.up": "model.layers.*.mlp.up_proj",
    "blocks.*.ffn.down": "model.layers.*.mlp.down_proj",
    "head.norm": "model.norm",
    "head.out": HEAD,
}
_BIASES = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}

LLAMA = Family("llama", "LlamaForCausalLM", {**_KEYS, **_BIASES, "ffn_bias": "mlp_bias"}, _NAMES, _DEFAULTS)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    {**_KEYS, "window": "sliding_window"},
    _NAMES,
    {**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _KEYS, _NAMES, {**_DEFAULTS, "num_key_value_heads": 32}, {"qkv_bias": True})
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    {**_KEYS, **_BIASES},
    _NAMES,
    {**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
    {"qk_norm": True},
)
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    {**_KEYS, **_BIASES},
    _NAMES,
    {
        **_DEFAULTS,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    {"norm": "rms-plus-one", "scaled_embedding": True},
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    {
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "ffn": "n_inner",
        "vocab": "vocab_size",
        "tied": "tie_word_embeddings",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
        "max_positions": "n_positions",
    },
    {
        "embed.table": "transformer.wte",
        "embed.positions": "transformer.wpe",
        "blocks.*.attn_norm": "transformer.h.*.ln_1",
        "blocks.*.attn.q": "transformer.h.*.attn.c_attn",
        "blocks.*.attn.k": "transformer.h.*.attn.c_attn",
        "blocks.*.attn.v": "transformer.h.*.attn.c_attn",
        "blocks.*.attn.out": "transformer.h.*.attn.c_proj",
        "blocks.*.ffn_norm": "transformer.h.*.ln_2",
        "blocks.*.ffn.up": "transformer.h.*.mlp.c_fc",
        "blocks.*.ffn.down": "transformer.h.*.mlp.c_proj",
        "head.norm": "transformer.ln_f",
        "head.out": HEAD,
    },
    {
        "n_inner": None,
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "n_positions": 1024,
    },
    {
        "norm": "layer",
        "positions": "learned",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
    },
    prefix="transformer.",
    transposed=("c_attn", "c_proj", "c_fc"),
    ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
)

_EXPERTS = "model.layers.*.mlp.experts.*"
_EXPERT_NAMES = {
    **_NAMES,
    "blocks.*.ffn.router": "model.layers.*.mlp.gate",
    "blocks.*.ffn.experts.*.gate": f"{_EXPERTS}.gate_proj",
    "blocks.*.ffn.experts.*.up": f"{_EXPERTS}.up_proj",
    "blocks.*.ffn.experts.*.down": f"{_EXPERTS}.down_proj",
}
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    {
        **_KEYS,
        "window": "sliding_window",
        "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    {
        **_NAMES,
        "blocks.*.ffn.router": "model.layers.*.block_sparse_moe.gate",
        "blocks.*.ffn.experts.*.gate": "model.layers.*.block_sparse_moe.experts.*.w1",
        "blocks.*.ffn.experts.*.up": "model.layers.*.block_sparse_moe.experts.*.w3",
        "blocks.*.ffn.experts.*.down": "model.layers.*.block_sparse_moe.experts.*.w2",
    },
    {
        **_DEFAULTS,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    {"gate": "topk-softmax"},
    only={"router_jitter_noise": (None, 0)},
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {
        **_KEYS,
        **_BIASES,
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_ffn": "moe_intermediate_size",
        "gate_renormalise": "norm_topk_prob",
    },
    _EXPERT_NAMES,
    {
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    {"qk_norm": True},
    spelled={"num_experts": "num_local_experts"},
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    {
        **{field: key for field, key in (_KEYS | _BIASES).items() if field != "head_dim"},
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "gate_renormalise": "norm_topk_prob",
    },
    _EXPERT_NAMES,
    {
        **_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    {"qk_norm": True, "qk_norm_over": "all"},
)

_LATENT_NAMES = {
    **{ours: theirs for ours, theirs in _EXPERT_NAMES.items() if ".attn." not in ours},
    "blocks.*.attn.q": "model.layers.*.self_attn.q_proj",
    "blocks.*.attn.q_down": "model.layers.*.self_attn.q_a_proj",
    "blocks.*.attn.q_latent_norm": "model.layers.*.self_attn.q_a_layernorm",
    "blocks.*.attn.q_up": "model.layers.*.self_attn.q_b_proj",
    "blocks.*.attn.kv_down": "model.layers.*.self_attn.kv_a_proj_with_mqa",
    "blocks.*.attn.k_turned": "model.layers.*.self_attn.kv_a_proj_with_mqa",
    "blocks.*.attn.kv_latent_norm": "model.layers.*.self_attn.kv_a_layernorm",
    "blocks.*.attn.kv_up": "model.layers.*.self_attn.kv_b_proj",
    "blocks.*.attn.out": "model.layers.*.self_attn.o_proj",
    "blocks.*.ffn.shared.gate": "model.layers.*.mlp.shared_experts.gate_proj",
    "blocks.*.ffn.shared.up": "model.layers.*.mlp.shared_experts.up_proj",
    "blocks.*.ffn.shared.down": "model.layers.*.mlp.shared_experts.down_proj",
}
_LATENT_KEYS = {
    **{field: key for field, key in (_KEYS | _BIASES).items() if field != "head_dim"},
    **experts.KEYS,
    "experts": "n_routed_experts",
}
_LATENT_DEFAULTS = {**_DEFAULTS, **latent.DEFAULTS}
DEEPSEEK2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {field: key for field, key in _LATENT_KEYS.items() if field != "gate_renormalise"},
    _LATENT_NAMES,
    {
        **_LATENT_DEFAULTS,
        "n_routed_experts": 64,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
    },
    only={
        "mlp_bias": (None, False),
        "moe_layer_freq": (None, 1),
        "norm_topk_prob": (None, False),  # of which implementations make two things
        "scoring_func": (None, "softmax"),
        "topk_method": (None, "greedy", "group_limited_greedy"),
    },
    latent=True,
    pairs=True,
)
DEEPSEEK3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _LATENT_KEYS,
    {**_LATENT_NAMES, "blocks.*.ffn.router.balance": "model.layers.*.mlp.gate.e_score_correction_bias"},
    {
        **_LATENT_DEFAULTS,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
    {"gate": "sigmoid"},
    only={
        "moe_layer_freq": (None, 1),
        "rope_interleave": (None, True),
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
    },
    latent=True,
    pairs=True,
    further=True,
)

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GPT2, MIXTRAL, QWEN3_MOE, OLMOE, DEEPSEEK2, DEEPSEEK3)
FAMILIES = {one.name: one for one in _ALL}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises :class:`ConfigError` for one that is not known, with those that are."""
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    problem = f"not an architecture that Shoal knows{nearest(str(name), FAMILIES)}"
    raise ConfigError(setting("model_type", name, problem, f"it knows {', '.join(FAMILIES)}"))
