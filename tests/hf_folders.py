"""Tiny random models as Hugging Face folders: of every family, made by transformers, and a Llama made without it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shoal.data.tokenize import byte_tokenizer

VOCAB = 263  # more than the tokenizer's 259, as padded vocabularies are
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "q_lora_rank": 11,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}
# Rows of an expert in float32 are of a multiple of 16 bytes, which transformers' grouped products need.
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "head_dim": 8}
OLMOE_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 52}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
DENSE = {"first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
"""Of a family whose later layers have experts, where all are of the first."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model: ``model_type``, and what its config.json says besides the sizes that all share."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        if self.family == "gpt2":
            sizes = {"n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 64, "n_inner": 50}
        else:
            sizes = {
                "num_hidden_layers": 2,
                "hidden_size": 24,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 50,
                "max_position_embeddings": 64,
            }
        # Not near zero: what is left out must show.
        return {**sizes, "vocab_size": VOCAB, "initializer_range": 0.2, "eos_token_id": 256, **self.options}


TINY = {
    "llama2": Tiny("llama", {"tie_word_embeddings": False}),
    "llama3": Tiny("llama", {"tie_word_embeddings": True, "rope_theta": 500.0, "rope_scaling": LLAMA3}),
    "llama-linear": Tiny("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "head_dim": 8}),
    "llama-biases": Tiny("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Tiny("mistral", {"sliding_window": 5}),
    "mistral-full": Tiny("mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": Tiny("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": Tiny("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "qwen3": Tiny("qwen3", {"head_dim": 8}),
    "gemma": Tiny("gemma", {"head_dim": 8, "rms_norm_eps": 1e-5}),
    "qwen3-yarn": Tiny("qwen3", {"head_dim": 8, "rope_scaling": YARN}),
    "mixtral": Tiny(
        "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "intermediate_size": 52}
    ),
    "qwen3-moe": Tiny("qwen3_moe", QWEN_EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe-mixed": Tiny("qwen3_moe", QWEN_EXPERTS | {"mlp_only_layers": [0], "tie_word_embeddings": True}),
    "olmoe": Tiny("olmoe", OLMOE_EXPERTS),
    "olmoe-normed": Tiny("olmoe", OLMOE_EXPERTS | {"norm_topk_prob": True}),
    "deepseek2": Tiny("deepseek_v2", LATENTS | DEEPSEEK_EXPERTS | {"q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek2-groups": Tiny(
        "deepseek_v2",
        LATENTS | DEEPSEEK_EXPERTS | GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0},
    ),
    "deepseek3": Tiny(
        "deepseek_v3",
        LATENTS | DEEPSEEK_EXPERTS | GROUPS | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek3-plain": Tiny(
        "deepseek_v3", LATENTS | DEEPSEEK_EXPERTS | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}
    ),
    "deepseek2-dense": Tiny(
        "deepseek_v2",
        LATENTS | DENSE | {"q_lora_rank": None, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}},
    ),
    "deepseek3-dense": Tiny("deepseek_v3", LATENTS | DENSE | {"attention_bias": True}),
    "gpt2": Tiny("gpt2"),
    "gpt2-untied": Tiny("gpt2", {"tie_word_embeddings": False, "n_inner": None}),
}


def save_tiny(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Make the folder of the tiny model ``name``; ``options`` go to ``save_pretrained``. Returns the model of
    transformers, with no norm's weight at its initial value and no bias at zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = TINY[name]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(tiny.family, **tiny.config()))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer), alpha=0.2)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, **options)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def edit_json(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; None takes one out."""
    found = {**json.loads(path.read_text(encoding="utf-8")), **values}
    kept = {key: value for key, value in found.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


LLAMA_NAMES = {
    "embed.table.weight": "model.embed_tokens.weight",
    "blocks.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blocks.0.attn.q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blocks.0.attn.k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blocks.0.attn.v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blocks.0.attn.out.weight": "model.layers.0.self_attn.o_proj.weight",
    "blocks.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    "blocks.0.ffn.gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blocks.0.ffn.up.weight": "model.layers.0.mlp.up_proj.weight",
    "blocks.0.ffn.down.weight": "model.layers.0.mlp.down_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.out.weight": "lm_head.weight",
}
"""The names of the model of ``write_llama``, ours and theirs."""


def write_llama(folder: Path) -> Path:
    """A folder with an untied Llama of one layer, random, in one file, made without transformers."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 11, "vocab_size": VOCAB,
        "eos_token_id": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = {"k": (4, 8), "v": (4, 8), "gate": (11, 8), "up": (11, 8), "down": (8, 11), "table": (VOCAB, 8)}
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for ours, theirs in LLAMA_NAMES.items():
        module = ours.split(".")[-2]
        shape = (8,) if "norm" in module else (VOCAB, 8) if ours == "head.out.weight" else rows.get(module, (8, 8))
        tensors[theirs] = torch.randn(shape, generator=generator) * 0.3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def shard(folder: Path) -> None:
    """Divide the weights of a folder over two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    where = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
