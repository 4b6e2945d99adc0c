"""Multi-head latent attention (DeepSeek-V2, 2024).

What heads attend with is made in two steps. The stream goes *down* to narrow latents, one for the queries (or none, and
queries come from the stream) and one for keys and values. From those, each under a norm of its own, goes *up* what each
head has. The rotary features of keys are beside the latent, one set that all heads share; a head has features that turn
and others that do not.

Latents belong to no head, so tensor parallelism divides the ways up and keeps the ways down whole: ranks have the
latents alike, of which only ``entry`` knows.

Axes in names: B samples, T positions, H hidden, N heads, R rotary features, P plain ones, E those of values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config import Model as Shape
from shoal.model.context import Context
from shoal.model.linear import Linear
from shoal.model.roles import Role
from shoal.model.rope import growth

EPS = 1e-6
"""What is added to the mean square of a latent, whatever ``norm_eps`` is (as DeepSeek's models have it)."""


class LatentAttention(nn.Module):
    """Attention whose heads come from latents; ``core`` attends, ``name`` is that of the block."""

    def __init__(self, shape: Shape, name: str, core: nn.Module) -> None:
        super().__init__()
        assert shape.latent is not None
        one, queries = shape.latent, shape.heads * shape.head_dim
        self.window, self.name = shape.window, name
        self.widths = (one.query_rank or 0, one.rank, one.turned_dim)
        self.query_parts, self.key_parts = (one.plain_dim, one.turned_dim), (one.plain_dim, one.value_dim)
        # The kernels of attention take queries, keys and values of one width.
        self.core_width = max(shape.head_dim, one.value_dim)
        self.scale = (self.core_width / shape.head_dim) ** 0.5
        if shape.rope_scaling is not None:
            self.scale *= growth(shape.rope_scaling, shape.rope_scaling.mscale_all_dim) ** 2
        self.down = Linear(shape.hidden, sum(self.widths), bias=shape.qkv_bias)
        self.q_latent_norm = nn.RMSNorm(one.query_rank, EPS) if one.query_rank is not None else None
        self.q_up = Linear(one.query_rank, queries, bias=False) if one.query_rank is not None else None
        self.q = Linear(shape.hidden, queries, bias=False) if one.query_rank is None else None
        self.kv_latent_norm = nn.RMSNorm(one.rank, EPS)
        self.entry = nn.Identity()
        self.kv_up = Linear(one.rank, shape.heads * sum(self.key_parts), bias=False)
        self.core = core
        self.out = Linear(shape.heads * one.value_dim, shape.hidden, bias=shape.out_bias)

    def forward(self, x_BTH: Tensor, ctx: Context) -> Tensor:
        q_latent, kv_latent, k_BTR = self.down(x_BTH).split(self.widths, dim=-1)
        if self.q_latent_norm is not None:
            q_latent = self.q_latent_norm(q_latent)
        # In one tensor, which is exchanged once where there are several ranks.
        latents = self.entry(torch.cat((q_latent, self.kv_latent_norm(kv_latent), k_BTR), dim=-1))
        q_latent, kv_latent, k_BTR = latents.split(self.widths, dim=-1)
        # How many heads there are follows from the widths: a rank may hold some of them.
        q = self._queries(x_BTH, q_latent).unflatten(-1, (-1, sum(self.query_parts)))
        kv = self.kv_up(kv_latent).unflatten(-1, (-1, sum(self.key_parts)))
        (q_BTNP, q_BTNR), (k_BTNP, v_BTNE) = q.split(self.query_parts, -1), kv.split(self.key_parts, -1)
        k_BTNR = ctx.turn(k_BTR[:, :, None]).expand(-1, -1, k_BTNP.shape[2], -1)
        q, k, v = self._padded(q_BTNP, ctx.turn(q_BTNR)), self._padded(k_BTNP, k_BTNR), self._padded(v_BTNE)
        if self.scale != 1.0:
            q = q * self.scale
        if ctx.cache is not None:
            k, v = ctx.cache.extend(self.name, k, v, self.window)
        y_BTNE = self.core(q, k, v, ctx).transpose(1, 2)[..., : v_BTNE.shape[-1]]
        return self.out(y_BTNE.flatten(2))  # type: ignore[no-any-return]

    def _padded(self, *parts_BTN: Tensor) -> Tensor:
        """The features of ``parts`` side by side, and zeros, as the core has them: [B, N, T, width]."""
        whole = torch.cat(parts_BTN, dim=-1)
        return F.pad(whole, (0, self.core_width - whole.shape[-1])).transpose(1, 2)

    def _queries(self, x_BTH: Tensor, q_latent: Tensor) -> Tensor:
        if self.q_up is not None:
            return self.q_up(q_latent)  # type: ignore[no-any-return]
        assert self.q is not None
        return self.q(x_BTH)  # type: ignore[no-any-return]


def latent_roles(shape: Shape, into_residual: float) -> Mapping[str, Role]:
    """The roles of the modules of a :class:`LatentAttention`, by their names in it; ``into_residual`` is the standard
    deviation of what writes to the residual."""
    assert shape.latent is not None
    one = shape.latent
    down = [("q_down", one.query_rank or 0), ("kv_down", one.rank), ("k_turned", one.turned_dim)]
    heads = shape.heads
    return {
        "down": Role("latent", parts=tuple((name, rows) for name, rows in down if rows)),
        "q_latent_norm": Role("latent_norm"),
        "kv_latent_norm": Role("latent_norm"),
        "entry": Role("latent_entry"),
        "q": Role("qkv", heads=heads, kv_heads=heads),
        "q_up": Role("expand", heads=heads, kv_heads=heads),
        "kv_up": Role("expand", heads=heads, kv_heads=heads),
        "core": Role("attention"),
        "out": Role("out_proj", std=into_residual, heads=heads, kv_heads=heads),
    }
