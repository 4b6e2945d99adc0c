"""Modules as users write them, with the role tables that a person would write for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.model.roles import Role, RoleTable

Batch = dict[str, Tensor]


class MLP(nn.Module):
    """Two pairs of linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 31), nn.Linear(31, 13)
        self.c, self.d = nn.Linear(13, 17), nn.Linear(17, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.gelu(self.c(self.b(self.a(x).relu_()).tanh())))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """One matrix for query, key and value, and the number of heads written into the reshapes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        split = self.qkv(x).reshape(samples, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(samples, tokens, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 31), nn.GELU(), nn.Linear(31, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2020): patches, a class token, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        width = 24
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


class Odd(nn.Module):
    """What every rank has meets what is divided: norms of each head, a temperature, a gate for each position, a mask;
    keys and values in one matrix, of fewer heads than queries."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 24, bias=False), nn.Linear(16, 24), nn.Linear(24, 16)
        self.q_norm, self.k_norm = nn.LayerNorm(6), nn.RMSNorm(6)
        self.inner = Temperature()
        self.gate = nn.Linear(16, 1)
        self.up, self.down = nn.Linear(16, 10), nn.Linear(5, 16)
        self.head = nn.Linear(16, 5)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        q = self.q_norm(self.q(x).view(samples, tokens, 4, 6)).transpose(1, 2)
        k, v = self.kv(x).view(samples, tokens, 2, 2, 6).permute(2, 0, 3, 1, 4)
        k = self.inner(self.k_norm(k))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2) * self.gate(x).sigmoid())
        first, second = self.up(x).split([5, 5], dim=-1)
        x = x + self.down(first * second.tanh() * x.mean(-1, keepdim=True))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.log.exp()


class Encoder(nn.Module):
    """PyTorch's own encoder, whose attention takes samples and heads as one dim."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 37, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).mean(1)  # type: ignore[no-any-return]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=51, num_key_value_heads=2, use_cache=False, **shape))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    shape = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=51, use_cache=False, **rates, **shape))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "vit": ViT,
    "encoder": Encoder,
    "odd": Odd,
    "llama": llama,
    "gpt2": gpt2,
}

NORM = Role("norm")
TABLES: dict[str, RoleTable] = {
    "mlp": {"a": Role("gate_up"), "b": Role("down"), "c": Role("gate_up"), "d": Role("down")},
    "vit": {
        "blocks.*.norm1": NORM,
        "blocks.*.attn.qkv": Role("qkv", (("q", 24), ("k", 24), ("v", 24)), heads=4, kv_heads=4, fused=True),
        "blocks.*.attn.proj": Role("out_proj", heads=4, kv_heads=4),
        "blocks.*.norm2": NORM,
        "blocks.*.mlp.0": Role("gate_up"),
        "blocks.*.mlp.2": Role("down"),
        "norm": NORM,
        "head": Role("head"),
    },
    "encoder": {
        "encoder.layers.*.self_attn": Role("qkv", (("q", 16), ("k", 16), ("v", 16)), heads=4, kv_heads=4, fused=True),
        "encoder.layers.*.self_attn.out_proj": Role("out_proj", heads=4, kv_heads=4),
        "encoder.layers.*.linear1": Role("gate_up"),
        "encoder.layers.*.linear2": Role("down"),
        "encoder.layers.*.norm1": NORM,
        "encoder.layers.*.norm2": NORM,
    },
    "odd": {
        "q": Role("qkv", heads=4, kv_heads=2),
        "kv": Role("qkv", (("part0", 12), ("part1", 12)), heads=2, kv_heads=2, fused=True),
        "out": Role("out_proj", heads=4, kv_heads=2),
        "q_norm": NORM,
        "k_norm": NORM,
        "up": Role("gate_up", (("gate", 5), ("up", 5)), fused=True),
        "down": Role("down"),
        "head": Role("head"),
    },
    "llama": {
        "model.embed_tokens": Role("embed"),
        "model.layers.*.input_layernorm": NORM,
        "model.layers.*.self_attn.q_proj": Role("qkv", heads=4, kv_heads=2),
        "model.layers.*.self_attn.k_proj": Role("qkv", heads=2, kv_heads=2),
        "model.layers.*.self_attn.v_proj": Role("qkv", heads=2, kv_heads=2),
        "model.layers.*.self_attn.o_proj": Role("out_proj", heads=4, kv_heads=2),
        "model.layers.*.post_attention_layernorm": NORM,
        "model.layers.*.mlp.gate_proj": Role("gate_up"),
        "model.layers.*.mlp.up_proj": Role("gate_up"),
        "model.layers.*.mlp.down_proj": Role("down"),
        "model.norm": NORM,
        "lm_head": Role("head"),
    },
    "gpt2": {
        "transformer.wte": Role("embed"),
        "transformer.wpe": Role("position"),
        "transformer.h.*.ln_1": NORM,
        "transformer.h.*.attn.c_attn": Role(
            "qkv", (("q", 24), ("k", 24), ("v", 24)), heads=4, kv_heads=4, fused=True, transposed=True
        ),
        "transformer.h.*.attn.c_proj": Role("out_proj", heads=4, kv_heads=4, transposed=True),
        "transformer.h.*.ln_2": NORM,
        "transformer.h.*.mlp.c_fc": Role("gate_up", transposed=True),
        "transformer.h.*.mlp.c_proj": Role("down", transposed=True),
        "transformer.ln_f": NORM,
        "lm_head": Role("head"),
    },
}


def build(name: str) -> nn.Module:
    """The module in float64, of the same values on every rank and in every process."""
    torch.manual_seed(0)
    return MODULES[name]().double()


def batches(name: str, steps: int, samples: int) -> list[Batch]:
    """What the steps train on; labels of −100 do not count."""
    made = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        if name in ("llama", "gpt2"):
            tokens = torch.randint(0, 51, (samples, 11), generator=made)
            labels = tokens.roll(-1, 1).masked_fill(torch.rand(tokens.shape, generator=made) < 0.3, -100)
            found.append({"inputs": tokens, "labels": labels})
        else:
            shape = {"mlp": (7,), "vit": (3, 8, 8), "encoder": (5, 16), "odd": (5, 16)}[name]
            inputs = torch.randn(samples, *shape, generator=made, dtype=torch.float64)
            found.append({"inputs": inputs, "labels": torch.randint(0, 5, (samples,), generator=made)})
    return found


def loss(output: Any, batch: Batch) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), reduction="sum", ignore_index=-100)


def weight(batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum()
