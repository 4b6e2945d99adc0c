"""Each family without experts and latents computes what transformers computes with the same weights.

The others, whose weights transformers holds otherwise than files do, are compared by way of files:
tests/train/test_import_export.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, shape_of
from torch import Tensor, nn

from shoal.config import Model
from shoal.model.context import Cache
from shoal.model.decoder import Decoder

transformers = pytest.importorskip("transformers")

PLAIN = [name for name, options in FAMILIES.items() if not {"experts", "latent"} & set(options)]
LLAMA = {
    "embed.table": ["model.embed_tokens"],
    "attn_norm": ["input_layernorm"],
    "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.q_norm": ["self_attn.q_norm"],
    "attn.k_norm": ["self_attn.k_norm"],
    "attn.out": ["self_attn.o_proj"],
    "ffn_norm": ["post_attention_layernorm"],
    "ffn.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "ffn.down": ["mlp.down_proj"],
    "head.norm": ["model.norm"],
    "head.out": ["lm_head"],
}
GPT2 = {
    "embed.table": ["transformer.wte"],
    "embed.positions": ["transformer.wpe"],
    "attn_norm": ["ln_1"],
    "attn.qkv": ["attn.c_attn"],
    "attn.out": ["attn.c_proj"],
    "ffn_norm": ["ln_2"],
    "ffn.up": ["mlp.c_fc"],
    "ffn.down": ["mlp.c_proj"],
    "head.norm": ["transformer.ln_f"],
    "head.out": ["lm_head"],
}


def llama(make: Callable[..., Any], shape: Model, **more: Any) -> Any:
    """The settings of the families that call them as Llama does."""
    return make(
        num_hidden_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.ffn,
        vocab_size=shape.vocab, rms_norm_eps=shape.norm_eps, tie_word_embeddings=shape.tied,
        max_position_embeddings=4096, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_theta": shape.rope_theta, "rope_type": "default"} | more.pop("rope", {}), **more,
    )  # fmt: skip


def their_config(family: str, shape: Model) -> Any:
    match family:
        case "llama2":
            return llama(transformers.LlamaConfig, shape, rope={"rope_type": "linear", "factor": 4.0})
        case "llama3":
            rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0}
            rope |= {"original_max_position_embeddings": 40}
            return llama(transformers.LlamaConfig, shape, rope=rope)
        case "qwen2":
            return llama(transformers.Qwen2Config, shape)
        case "qwen3":
            return llama(transformers.Qwen3Config, shape)
        case "mistral":
            return llama(transformers.MistralConfig, shape, sliding_window=shape.window)
        case "gemma":
            return llama(transformers.GemmaConfig, shape, hidden_activation="gelu_pytorch_tanh")
        case _:
            return transformers.GPT2Config(
                n_layer=shape.layers, n_embd=shape.hidden, n_head=shape.heads, n_inner=shape.ffn,
                vocab_size=shape.vocab, n_positions=shape.max_positions, layer_norm_epsilon=shape.norm_eps,
                tie_word_embeddings=shape.tied, bos_token_id=None, eos_token_id=None,
            )  # fmt: skip


def theirs(family: str, shape: Model) -> Any:
    """Their model, with weights much larger than at the start of training, so that every part of it matters."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(their_config(family, shape)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def ours(family: str, shape: Model, other: Any) -> Decoder:
    """The decoder with the weights of their model."""
    model, weights = Decoder(shape).eval(), other.state_dict()
    table, layer = (GPT2, "transformer.h") if family == "gpt2" else (LLAMA, "model.layers")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, _, leaf = name.rpartition(".")
            prefix = ""
            if module.startswith("blocks."):
                _, number, module = module.split(".", 2)
                prefix = f"{layer}.{number}."
            found = [weights.pop(f"{prefix}{one}.{leaf}") for one in table[module]]
            # GPT-2 keeps its matrices as [in, out].
            turned = family == "gpt2" and leaf == "weight" and isinstance(model.get_submodule(name[:-7]), nn.Linear)
            parameter.copy_(torch.cat([one.t() if turned and module != "head.out" else one for one in found]))
    assert set(weights) <= {"lm_head.weight"} if shape.tied else not weights, "every weight has its place"
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", PLAIN)
def test_logits_are_those_of_transformers(family: str, tied: bool) -> None:
    one = shape_of(family, tied=tied)
    other = theirs(family, one)
    model = ours(family, one, other)
    tokens = torch.randint(0, one.vocab, (2, 19), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = other(tokens).logits
        assert expected.std() > 0.3, "the weights matter"
        batch = {"tokens": tokens, "positions": torch.arange(19)[None]}
        torch.testing.assert_close(model(batch, model.context(batch)), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(decoded(model, tokens), expected, rtol=1e-5, atol=1e-5)


def decoded(model: Decoder, tokens: Tensor) -> Tensor:
    """The logits of a prompt and of the positions after it, one at a time."""
    cache = Cache()
    steps = [tokens[:, :7], *tokens[:, 7:].split(1, dim=1)]
    return torch.cat([model.decode(step, cache) for step in steps], dim=1)
