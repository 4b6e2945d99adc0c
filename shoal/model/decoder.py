"""One decoder, by configuration, in plain PyTorch, with its role table beside it.

Pre-norm blocks of grouped-query attention and a feed-forward, input and output embeddings tied or not. As Llama has it:
RMS norms, rotary positions, a feed-forward with a gate, and no biases. Qwen, Mistral, Gemma and GPT-2 differ in a few
modules and settings, chosen when the model is built.

Linears that read the same input are one fused matrix (q, k, v; gate, up), so each input is fetched once and a layout
needs one entry collective for it.

Axes in names: B samples, T positions, H hidden, N heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config import Model as Shape
from shoal.model.activations import ACTIVATIONS
from shoal.model.context import Batch, Cache, Context
from shoal.model.dropout import Noise
from shoal.model.latent import LatentAttention, latent_roles
from shoal.model.linear import Linear
from shoal.model.loss import IGNORED, LinearCrossEntropy
from shoal.model.norms import norm_of
from shoal.model.roles import Kind, Role, RoleTable
from shoal.model.routed import Routed


class Fused(Linear):
    """Several linears that read the same input as one matrix; returns their outputs apart, of the widths ``parts``."""

    def __init__(self, width: int, parts: tuple[int, ...], *, bias: bool) -> None:
        super().__init__(width, sum(parts), bias=bias)
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return torch.split(super().forward(x), list(self.parts), dim=-1)


class Embed(nn.Module):
    """Token embedding, scaled where the model does so, plus that of learned positions where it has them, with
    dropout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        learned = shape.positions == "learned"
        self.table = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.max_positions, shape.hidden) if learned else None
        self.scale = shape.hidden**0.5 if shape.scaled_embedding else 1.0
        self.rate = shape.dropout

    def forward(self, tokens_BT: Tensor, ctx: Context) -> Tensor:
        x_BTH = self.table(tokens_BT)
        if self.scale != 1.0:
            x_BTH = x_BTH * self.scale
        if self.positions is not None:
            x_BTH = x_BTH + self.positions(ctx.positions)
        return ctx.drop(x_BTH, self.rate, "embed")


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
    """Grouped-query attention, with rotary positions where none are learned, and norms of queries and keys, of each
    head or of all together, where the model has them."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        self.head_dim, self.window, self.name = shape.head_dim, shape.window, name
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.qkv = Fused(shape.hidden, (q, kv, kv), bias=shape.qkv_bias)
        self.norms_heads = shape.qk_norm_over == "head"
        normed = (shape.head_dim, shape.head_dim) if self.norms_heads else (q, kv)
        self.q_norm = norm_of(shape, normed[0]) if shape.qk_norm else None
        self.k_norm = norm_of(shape, normed[1]) if shape.qk_norm else None
        self.core = CausalAttention()
        self.out = Linear(q, shape.hidden, bias=shape.out_bias)

    def forward(self, x_BTH: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.qkv(x_BTH)
        if self.q_norm is not None and self.k_norm is not None and not self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        # How many heads there are follows from the widths: a rank may hold some of them.
        q_BTND, k_BTKD, v_BTKD = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and self.norms_heads:
            q_BTND, k_BTKD = self.q_norm(q_BTND), self.k_norm(k_BTKD)
        q, k, v = ctx.turn(q_BTND).transpose(1, 2), ctx.turn(k_BTKD).transpose(1, 2), v_BTKD.transpose(1, 2)
        if ctx.cache is not None:
            k, v = ctx.cache.extend(self.name, k, v, self.window)
        return self.out(self.core(q, k, v, ctx).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Gated: down(activation(gate(x)) · up(x)) (Shazeer 2020), with ``width`` columns."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.gate_up = Fused(shape.hidden, (width, width), bias=shape.ffn_bias)
        self.activation = ACTIVATIONS[shape.activation]
        self.down = Linear(width, shape.hidden, bias=shape.ffn_bias)

    def forward(self, x_BTH: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTH)
        return self.down(self.activation(gate) * up)  # type: ignore[no-any-return]


class PlainFeedForward(nn.Module):
    """Without a gate: down(activation(up(x)))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = Linear(shape.hidden, shape.ffn, bias=shape.ffn_bias)
        self.activation = ACTIVATIONS[shape.activation]
        self.down = Linear(shape.ffn, shape.hidden, bias=shape.ffn_bias)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTH)))  # type: ignore[no-any-return]


def feed_forward_of(shape: Shape, number: int) -> nn.Module:
    """That of block ``number``: with experts, or without."""
    if shape.experts and number >= shape.dense_layers:
        width = shape.shared_experts * shape.expert_width
        shared = FeedForward(shape, width) if width else None
        return Routed(shape, f"blocks.{number}", ACTIVATIONS[shape.activation], shared)
    return FeedForward(shape, shape.ffn) if shape.gated else PlainFeedForward(shape)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), each with dropout before the sum."""

    def __init__(self, shape: Shape, number: int) -> None:
        name = f"blocks.{number}"
        super().__init__()
        self.name, self.rate = name, shape.dropout
        self.attn_norm = norm_of(shape, shape.hidden)
        self.attn = LatentAttention(shape, name, CausalAttention()) if shape.latent else Attention(shape, name)
        self.ffn_norm = norm_of(shape, shape.hidden)
        self.ffn = feed_forward_of(shape, number)

    def forward(self, x_BTH: Tensor, ctx: Context) -> Tensor:
        attended = self.attn(self.attn_norm(x_BTH), ctx)
        x_BTH = x_BTH + ctx.drop(attended, self.rate, f"{self.name}.attn")
        x = self.ffn_norm(x_BTH)
        fed = self.ffn(x, ctx) if isinstance(self.ffn, Routed) else self.ffn(x)
        return x_BTH + ctx.drop(fed, self.rate, f"{self.name}.ffn")


class Head(nn.Module):
    """Final norm and output matrix: the summed loss where the context has labels, logits where it has none."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = norm_of(shape, shape.hidden)
        self.out = Linear(shape.hidden, shape.vocab, bias=False)
        self.loss = LinearCrossEntropy(shape.z_loss)

    def forward(self, x_BTH: Tensor, ctx: Context) -> Tensor:
        x_BTH = self.norm(x_BTH)
        if ctx.labels is None:
            wanted = x_BTH if ctx.newest is None else x_BTH[:, ctx.newest : ctx.newest + 1]
            return self.out(wanted)  # type: ignore[no-any-return]
        return self.loss(x_BTH, self.out.weight, ctx.labels)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The whole model, and what an engine asks of a model: its layers in order, and a context per micro-batch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.roles: RoleTable = decoder_roles(shape)
        self.embed = Embed(shape)
        self.blocks = nn.ModuleList(Block(shape, i) for i in range(shape.layers))
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
        self,
        batch: Batch,
        *,
        seed: int = 0,
        step: int = 0,
        train: bool = False,
        cache: Cache | None = None,
        newest: bool = False,
    ) -> Context:
        """The context of one micro-batch: keys for dropout only when it trains. With a ``cache`` its positions follow
        those that the cache has seen; logits are those of all, or of the ``newest`` alone. Raises
        :class:`ConfigError` where the positions are more than the model has learned."""
        drops = train and self.shape.dropout > 0
        noise = Noise.of(seed, step, batch["sample"], batch["tokens"].shape[1]) if drops else None
        if drops and "places" in batch:
            noise = Noise.at(seed, step, batch["sample"], batch["places"])
        ends_first = chain(self.head.parameters(), self.embed.parameters(), self.blocks.parameters())
        dtype = next(ends_first).dtype  # to look through the blocks of other stages takes a per cent of a step
        return Context.of(self.shape, dtype, batch, noise, cache, newest=newest)

    def decode(self, tokens_BT: Tensor, cache: Cache, *, newest: bool = False) -> Tensor:
        """Logits [B, T, vocabulary] of positions that follow those in the cache, which grows by them; [B, 1,
        vocabulary] of the ``newest`` alone."""
        batch = cache.following(tokens_BT)
        return self(batch, self.context(batch, cache=cache, newest=newest))  # type: ignore[no-any-return]


def decoder_roles(shape: Shape) -> RoleTable:
    """The role of each module that a :class:`Decoder` may have. Matrices that write to the residual start smaller, by
    1/√(2L) (GPT-2); norms that scale by 1 + weight start at a weight of zero."""
    into_residual = 0.02 / (2 * shape.layers) ** 0.5
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm_std = 0.0 if shape.norm == "rms-plus-one" else Role.std
    norm = Role("norm", std=norm_std)
    kind: Kind = "head_norm" if shape.qk_norm_over == "head" else "heads_norm"
    attention: Mapping[str, Role] = {
        "qkv": Role("qkv", parts=(("q", q), ("k", kv), ("v", kv)), heads=shape.heads, kv_heads=shape.kv_heads),
        "q_norm": Role(kind, std=norm_std, heads=shape.heads, kv_heads=shape.heads),
        "k_norm": Role(kind, std=norm_std, heads=shape.heads, kv_heads=shape.kv_heads),
        "core": Role("attention"),
        "out": Role("out_proj", std=into_residual, heads=shape.heads, kv_heads=shape.kv_heads),
    }
    if shape.latent is not None:
        attention = latent_roles(shape, into_residual)
    return {
        "embed.table": Role("embed"),
        "embed.positions": Role("position"),
        "blocks.*.attn_norm": norm,
        **{f"blocks.*.attn.{name}": role for name, role in attention.items()},
        "blocks.*.ffn_norm": norm,
        "blocks.*.ffn.gate_up": Role("gate_up", parts=(("gate", shape.ffn), ("up", shape.ffn))),
        "blocks.*.ffn.up": Role("gate_up"),
        "blocks.*.ffn.down": Role("down", std=into_residual),
        **(expert_roles(shape, into_residual) if shape.experts else {}),
        "head.norm": norm,
        "head.out": Role("head"),
        "head.loss": Role("loss"),
    }


def expert_roles(shape: Shape, into_residual: float) -> RoleTable:
    """Those of the modules of a layer with experts."""
    width, shared = shape.expert_width, shape.shared_experts * shape.expert_width
    stacked = partial(Role, experts=shape.experts, chosen=shape.experts_per_token)
    return {
        "blocks.*.ffn.tokens": Role("tokens"),
        "blocks.*.ffn.router": Role("router"),
        "blocks.*.ffn.experts": Role("experts"),
        "blocks.*.ffn.experts.gate_up": stacked("expert", parts=(("gate", width), ("up", width))),
        "blocks.*.ffn.experts.down": stacked("expert_down", parts=(("down", shape.hidden),), std=into_residual),
        "blocks.*.ffn.shared.gate_up": Role("gate_up", parts=(("gate", shared), ("up", shared))),
        "blocks.*.ffn.shared.down": Role("down", std=into_residual),
    }
