"""A Llama-style decoder, by configuration, in plain PyTorch, with its role table beside it.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU feed-forward, RMS norms, input and output
embeddings tied or not. Linears that read the same input are one fused matrix (q, k, v; gate, up), so each input is
fetched once and a layout needs one entry collective for it.

Axes in names: B samples, T positions, H hidden, N heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config import Model as Shape
from shoal.model.context import Batch, Cache, Context, document_mask, rope_tables, rotate
from shoal.model.dropout import Noise
from shoal.model.linear import Linear
from shoal.model.loss import IGNORED, linear_cross_entropy
from shoal.model.roles import Role, RoleTable


class Fused(Linear):
    """Several linears that read the same input as one matrix; returns their outputs apart, of the widths ``parts``."""

    def __init__(self, width: int, parts: tuple[int, ...]) -> None:
        super().__init__(width, sum(parts), bias=False)
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return torch.split(super().forward(x), list(self.parts), dim=-1)


class Embed(nn.Module):
    """Token embedding with dropout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.vocab, shape.hidden)
        self.rate = shape.dropout

    def forward(self, tokens_BT: Tensor, ctx: Context) -> Tensor:
        return ctx.drop(self.table(tokens_BT), self.rate, "embed")


class CausalAttention(nn.Module):
    """Softmax attention over the positions up to one's own, or those that the context's mask allows."""

    def forward(self, q_BNTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, ctx: Context) -> Tensor:
        shared = q_BNTD.shape[1] != k_BKTD.shape[1]
        # One new position after a cache sees everything; otherwise queries and keys are the same positions.
        causal = ctx.mask is None and q_BNTD.shape[2] > 1
        return F.scaled_dot_product_attention(
            q_BNTD, k_BKTD, v_BKTD, attn_mask=ctx.mask, is_causal=causal, enable_gqa=shared
        )


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        self.head_dim, self.name = shape.head_dim, name
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.qkv = Fused(shape.hidden, (q, kv, kv))
        self.core = CausalAttention()
        self.out = Linear(q, shape.hidden, bias=False)

    def forward(self, x_BTH: Tensor, ctx: Context) -> Tensor:
        # How many heads there are follows from the widths: a rank may hold some of them.
        q_BTND, k_BTKD, v_BTKD = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x_BTH))
        q = rotate(q_BTND, ctx.rope).transpose(1, 2)
        k = rotate(k_BTKD, ctx.rope).transpose(1, 2)
        v = v_BTKD.transpose(1, 2)
        if ctx.cache is not None:
            k, v = ctx.cache.extend(self.name, k, v)
        return self.out(self.core(q, k, v, ctx).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)) (Shazeer 2020)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = Fused(shape.hidden, (shape.ffn, shape.ffn))
        self.down = Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x_BTH: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTH)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), each with dropout before the sum."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        self.name, self.rate = name, shape.dropout
        self.attn_norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.attn = Attention(shape, name)
        self.ffn_norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x_BTH: Tensor, ctx: Context) -> Tensor:
        attended = self.attn(self.attn_norm(x_BTH), ctx)
        x_BTH = x_BTH + ctx.drop(attended, self.rate, f"{self.name}.attn")
        fed = self.ffn(self.ffn_norm(x_BTH))
        return x_BTH + ctx.drop(fed, self.rate, f"{self.name}.ffn")


class LinearCrossEntropy(nn.Module):
    """The summed loss of hidden states [B, T, H] under an output matrix [vocabulary, H] and labels [B, T]."""

    def forward(self, x_BTH: Tensor, weight: Tensor, labels_BT: Tensor) -> Tensor:
        return linear_cross_entropy(x_BTH.flatten(0, 1), weight, labels_BT.flatten())


class Head(nn.Module):
    """Final norm and output matrix: the summed loss where the context has labels, logits where it has none."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.out = Linear(shape.hidden, shape.vocab, bias=False)
        self.loss = LinearCrossEntropy()

    def forward(self, x_BTH: Tensor, ctx: Context) -> Tensor:
        x_BTH = self.norm(x_BTH)
        if ctx.labels is None:
            return self.out(x_BTH)  # type: ignore[no-any-return]
        return self.loss(x_BTH, self.out.weight, ctx.labels)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The whole model, and what an engine asks of a model: its layers in order, and a context per micro-batch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.roles: RoleTable = decoder_roles(shape)
        self.embed = Embed(shape)
        self.blocks = nn.ModuleList(Block(shape, f"blocks.{i}") for i in range(shape.layers))
        self.head = Head(shape)
        if shape.tied:
            self.head.out.weight = self.embed.table.weight

    def forward(self, batch: Batch, ctx: Context) -> Tensor:
        """The summed loss of a batch, or its logits [B, T, vocabulary] where the context has no labels."""
        x = batch["tokens"]
        for _, layer in self.layers():
            x = layer(x, ctx)
        return x

    def layers(self) -> list[tuple[str, nn.Module]]:
        """Embedding, blocks and head under their names, in the order in which they run."""
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("embed", self.embed), *blocks, ("head", self.head)]

    def weight(self, batch: Batch) -> Tensor:
        """How many positions of the batch count in the loss."""
        return (batch["labels"] != IGNORED).sum()

    @property
    def module(self) -> nn.Module:
        """The modules that hold the parameters."""
        return self

    def enter(self, batch: Batch) -> Tensor:
        """The input of the first layer."""
        return batch["tokens"]

    def apply_layer(self, layer: nn.Module, x: Tensor, ctx: Context) -> Tensor:
        """The output of one of the layers."""
        return layer(x, ctx)  # type: ignore[no-any-return]

    def loss(self, output: Tensor, ctx: Context) -> Tensor:
        """The summed loss, which the last layer has computed already."""
        return output

    def context(
        self, batch: Batch, *, seed: int = 0, step: int = 0, train: bool = False, cache: Cache | None = None
    ) -> Context:
        """The context of one micro-batch: keys for dropout only when it trains. With a ``cache`` its positions follow
        those that the cache has seen."""
        shape, tokens = self.shape, batch["tokens"]
        documents = batch.get("documents")
        return Context(
            rope=self._rope(batch["positions"]),
            mask=None if documents is None else document_mask(documents),
            labels=batch.get("labels"),
            noise=Noise.of(seed, step, batch["sample"], tokens.shape[1]) if train and shape.dropout else None,
            cache=cache,
        )

    def decode(self, tokens_BT: Tensor, cache: Cache) -> Tensor:
        """Logits [B, T, vocabulary] of positions that follow those in the cache, which grows by them."""
        batch = cache.following(tokens_BT)
        return self(batch, self.context(batch, cache=cache))  # type: ignore[no-any-return]

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = self.shape, next(self.parameters()).dtype
        return rope_tables(positions, shape.head_dim, shape.rope_theta, dtype)


def decoder_roles(shape: Shape) -> RoleTable:
    """The role of each module of a :class:`Decoder`. Matrices that write to the residual start smaller, by 1/√(2L)."""
    into_residual = 0.02 / (2 * shape.layers) ** 0.5
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "embed.table": Role("embed"),
        "blocks.*.attn_norm": Role("norm"),
        "blocks.*.attn.qkv": Role(
            "qkv", parts=(("q", q), ("k", kv), ("v", kv)), heads=shape.heads, kv_heads=shape.kv_heads
        ),
        "blocks.*.attn.core": Role("attention"),
        "blocks.*.attn.out": Role("out_proj", std=into_residual, heads=shape.heads, kv_heads=shape.kv_heads),
        "blocks.*.ffn_norm": Role("norm"),
        "blocks.*.ffn.gate_up": Role("gate_up", parts=(("gate", shape.ffn), ("up", shape.ffn))),
        "blocks.*.ffn.down": Role("down", std=into_residual),
        "head.norm": Role("norm"),
        "head.out": Role("head"),
        "head.loss": Role("loss"),
    }
