"""The model, as far as its time and memory go: its layers by kind, and each kind's weight matrices.

A :class:`Shape` is made from a run file's ``[model]`` or from what a publication prints, so that both are priced by the
same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple


class Matrix(NamedTuple):
    """A weight of ``inputs`` × ``outputs``. Tensor parallelism cuts ``columns`` (outputs), ``rows`` (inputs) or, of one
    that every rank needs whole, ``none``."""

    name: str
    inputs: int
    outputs: int
    cut: str = "columns"


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434): ranks of the compressed queries (0: not compressed) and
    of keys and values, and the part of a head that carries positions."""

    query_rank: int
    key_value_rank: int
    rotary: int


@dataclass(frozen=True)
class Layer:
    """One kind of layer. ``experts`` is 0 where the feed-forward is dense."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    latent: Latent | None = None
    window: int = 0
    """Positions that attention sees; 0 for all."""

    @cached_property
    def attention(self) -> tuple[Matrix, ...]:
        """The matrices around attention."""
        h, d = self.hidden, self.head_dim
        if (latent := self.latent) is None:
            return (
                Matrix("qkv", h, (self.heads + 2 * self.kv_heads) * d),
                Matrix("out", self.heads * d, h, "rows"),
            )
        whole = d + latent.rotary
        queries = (
            (Matrix("q_down", h, latent.query_rank, "none"), Matrix("q_up", latent.query_rank, self.heads * whole))
            if latent.query_rank
            else (Matrix("q", h, self.heads * whole),)
        )
        return (
            *queries,
            Matrix("kv_down", h, latent.key_value_rank + latent.rotary, "none"),
            Matrix("kv_up", latent.key_value_rank, self.heads * 2 * d),
            Matrix("out", self.heads * d, h, "rows"),
        )

    @cached_property
    def feed_forward(self) -> tuple[Matrix, ...]:
        """The matrices that every token goes through: a dense feed-forward, or shared experts and the router."""
        if not self.experts:
            return self._two(self.ffn)
        shared = self._two(self.shared_ffn) if self.shared_ffn else ()
        return (*shared, Matrix("router", self.hidden, self.experts, "none"))

    @cached_property
    def expert(self) -> tuple[Matrix, ...]:
        """The matrices of one routed expert."""
        return self._two(self.expert_ffn) if self.experts else ()

    def _two(self, ffn: int) -> tuple[Matrix, ...]:
        up = Matrix("up", self.hidden, ffn * (2 if self.gated else 1))
        return up, Matrix("down", ffn, self.hidden, "rows")

    @cached_property
    def scores(self) -> int:
        """Channels of a query and of a value, over all heads: what a pair of positions costs."""
        rotary = self.latent.rotary if self.latent else 0
        return self.heads * (2 * self.head_dim + rotary)

    @cached_property
    def dense(self) -> int:
        """Parameters that every rank of an expert group holds: all but routed experts. Two norms included."""
        return sum(m.inputs * m.outputs for m in (*self.attention, *self.feed_forward)) + 2 * self.hidden

    @cached_property
    def routed(self) -> int:
        """Parameters of all routed experts."""
        return self.experts * sum(m.inputs * m.outputs for m in self.expert)

    @cached_property
    def active(self) -> int:
        """Parameters that a token meets."""
        return self.dense + (self.routed // self.experts * self.topk if self.experts else 0)


@dataclass(frozen=True)
class Shape:
    """A decoder: the layers in order, as (how many, kind), between an embedding and a head."""

    name: str
    blocks: tuple[tuple[int, Layer], ...]
    vocab: int
    tied: bool = False
    bias: bool = False
    learned_positions: int = 0

    @cached_property
    def each(self) -> tuple[Layer, ...]:
        """The layers one by one."""
        return tuple(layer for count, layer in self.blocks for _ in range(count))

    @property
    def layers(self) -> int:
        return len(self.each)

    @property
    def hidden(self) -> int:
        return self.blocks[0][1].hidden

    @property
    def heads(self) -> int:
        return self.blocks[0][1].heads

    @property
    def kv_heads(self) -> int:
        return self.blocks[0][1].kv_heads

    @property
    def ffn(self) -> int:
        return max(layer.ffn for _, layer in self.blocks)

    @property
    def experts(self) -> int:
        return max(layer.experts for _, layer in self.blocks)

    @cached_property
    def parameters(self) -> int:
        """All of them; matrices and norms, and biases where there are some."""
        ends = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden * (1 + self.learned_positions)
        return ends + sum(layer.dense + layer.routed for layer in self.each)

    @cached_property
    def active(self) -> int:
        """Parameters that a token is multiplied with: the embedding is looked up."""
        return self.vocab * self.hidden + sum(layer.active for layer in self.each)

    def flops(self, seq: int, causal: bool = False) -> float:
        """Operations a token of training: 6 a parameter, and attention's, without recomputation. Attention counts in
        full unless ``causal``, as most publications have it."""
        seen = sum(layer.scores * (min(seq, layer.window) if layer.window else seq) for layer in self.each)
        return 6.0 * self.active + 6.0 * seen * (0.5 if causal else 1.0)


def of_model(model: Any) -> Shape:
    """The shape of a run file's ``[model]``. Fields of experts are read where the model has them."""

    def field(name: str, default: Any = 0) -> Any:
        return getattr(model, name, None) or default

    experts = field("experts")
    latent, head_dim = None, model.head_dim
    if given := field("latent", None):
        # Values are as wide as what of a key does not turn, in all models that have them.
        latent, head_dim = Latent(given.query_rank or 0, given.rank, given.turned_dim), given.value_dim
    expert_ffn = field("expert_ffn", model.ffn)

    def layer(routed: bool) -> Layer:
        return Layer(
            model.hidden,
            model.heads,
            model.kv_heads,
            head_dim,
            model.ffn,
            model.gated,
            experts if routed else 0,
            field("experts_per_token") if routed else 0,
            expert_ffn if routed else 0,
            field("shared_experts") * expert_ffn if routed else 0,
            latent,
            field("window"),
        )

    first = field("dense_layers") if experts else model.layers
    blocks = tuple((count, layer(routed)) for count, routed in ((first, False), (model.layers - first, True)) if count)
    positions = model.max_positions if model.positions == "learned" else 0
    return Shape(field("name", "model"), blocks, model.vocab, model.tied, model.ffn_bias, positions)


def of_table(name: str, table: Mapping[str, Any]) -> Shape:
    """The shape of a model as publications print it: ``layers hidden heads kv_heads head_dim ffn vocab gated_mlp``;
    with experts also ``experts topk moe_ffn shared_ffn dense_layers``, of which the first few layers are dense; and
    ``latent``, a :class:`Latent`."""
    hidden, heads = table["hidden"], table["heads"]
    experts, latent = table.get("experts") or 0, table.get("latent")
    kv_heads = table.get("kv_heads") or heads
    head_dim = table.get("head_dim") or hidden // heads
    ffn = table.get("dense_ffn") or table.get("ffn") or 4 * hidden
    expert_ffn = table.get("moe_ffn") or ffn

    def layer(routed: bool) -> Layer:
        one = Layer(hidden, heads, kv_heads, head_dim, ffn, bool(table.get("gated_mlp")), latent=latent)
        if not routed:
            return one
        shared, topk = table.get("shared_ffn") or 0, table.get("topk") or 1
        return replace(one, experts=experts, topk=topk, expert_ffn=expert_ffn, shared_ffn=shared)

    layers = table["layers"]
    first = table.get("dense_layers") or 0 if experts else layers
    blocks = tuple((count, layer(routed)) for count, routed in ((first, False), (layers - first, True)) if count)
    return Shape(name, blocks, table["vocab"])
