"""Latent attention beside its formula, written a head and a position at a time; and what it may not be told."""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch
from families import logits, model_of, shape_of
from pydantic import ValidationError
from torch import Tensor

from shoal.config import Model
from shoal.model.latent import EPS, LatentAttention
from shoal.model.rope import rope_tables, rotate

T = 5


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + EPS).sqrt() * weight


def by_formula(attention: Any, shape: Model, x_TH: Tensor) -> Tensor:
    """[T, H] of one sample. Queries have plain features and turned ones, keys plain ones of their own and turned ones
    that all heads share."""
    one = shape.latent
    assert one is not None
    rope = rope_tables(torch.arange(T)[None], one.turned_dim, shape.rope_theta, torch.float64, shape.rope_scaling)

    def turned(x_R: Tensor, at: int) -> Tensor:
        return rotate(x_R.view(1, 1, 1, -1), (rope[0][:, at : at + 1], rope[1][:, at : at + 1])).flatten()

    down = attention.down(x_TH)
    q_rank, values = one.query_rank or 0, []
    keys_values = [normed(row[q_rank : q_rank + one.rank], attention.kv_latent_norm.weight) for row in down]
    shared = [turned(row[q_rank + one.rank :], at) for at, row in enumerate(down)]
    for at in range(T):
        q = (
            attention.q(x_TH[at])
            if q_rank == 0
            else attention.q_up(normed(down[at, :q_rank], attention.q_latent_norm.weight))
        )
        heads = []
        for head in range(shape.heads):
            q_head = q.view(shape.heads, -1)[head]
            scores, theirs = [], []
            for past in range(at + 1):
                kv = attention.kv_up(keys_values[past]).view(shape.heads, -1)[head]
                score = q_head[: one.plain_dim] @ kv[: one.plain_dim]
                score = score + turned(q_head[one.plain_dim :], at) @ shared[past]
                scores.append(float(score) * attention.scale * attention.core_width**-0.5)
                theirs.append(kv[one.plain_dim :])
            total = sum(exp(score) for score in scores)
            heads.append(torch.stack([exp(s) / total * v for s, v in zip(scores, theirs, strict=True)]).sum(0))
        values.append(attention.out(torch.cat(heads)))
    return torch.stack(values)


@pytest.mark.parametrize("family", ["latent", "deepseek2"])
def test_attention_is_that_of_the_formula(family: str) -> None:
    model = model_of(family)
    attention = model.blocks[1].attn
    assert isinstance(attention, LatentAttention)
    x_BTH = torch.randn(2, T, model.shape.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tokens = torch.zeros(2, T, dtype=torch.int64)
    with torch.no_grad():
        found = attention(x_BTH, model.context({"tokens": tokens, "positions": torch.arange(T)[None]}))
        expected = torch.stack([by_formula(attention, model.shape, x_TH) for x_TH in x_BTH])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_scores_are_divided_by_the_root_of_a_querys_features_whatever_values_have() -> None:
    for family, features in (("latent", 7), ("deepseek2", 11)):
        attention: Any = model_of(family).blocks[0].attn
        growth = (1 + 0.1 * 0.6 * 2.0794415416798357) ** 2 if family == "deepseek2" else 1.0  # of ln 8
        assert attention.scale * attention.core_width**-0.5 == pytest.approx(growth * features**-0.5, rel=1e-14)


def test_a_window_is_seen_by_latent_attention_too() -> None:
    tokens = torch.randint(0, 61, (1, 12), generator=torch.Generator().manual_seed(2))
    whole, changed = tokens.clone(), tokens.clone()
    changed[0, 0] += 1
    model = model_of("latent")
    model.shape = shape_of("latent", window=3)
    one, other = logits(model, whole), logits(model, changed)
    assert torch.equal(one[:, 7:], other[:, 7:]), "three layers see 3 · 2 positions back"
    assert not torch.equal(one[:, :7], other[:, :7])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_heads": 2}, "kv_heads = 2: not with latent attention; leave it out, or use 4"),
        ({"head_dim": 8}, "head_dim = 8: not with latent attention; leave it out, or use 7"),
        ({"qk_norm": True}, "qk_norm = True: not with latent attention; leave it out, or use false"),
        ({"positions": "learned", "rope_theta": 1e4}, "positions = learned: not with latent attention"),
        (
            {"latent": {"rank": 7, "plain_dim": 3, "turned_dim": 5, "value_dim": 6}},
            "turned_dim = 5: must be even; use 6",
        ),
    ],
)
def test_what_does_not_go_with_latents_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        shape_of("latent", **options)
    assert says in str(refused.value)


def test_norms_over_all_heads_need_norms() -> None:
    with pytest.raises(ValueError, match=r"qk_norm_over = all.*use qk_norm = true"):
        shape_of("llama3", qk_norm_over="all")
