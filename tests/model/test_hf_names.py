"""Where a logical tensor lies in one of theirs, fused and transposed as it may be."""

from __future__ import annotations

import pytest
import torch

from shoal.config import Model
from shoal.model.hf import FAMILIES, Family, logical_shapes, stored_tensors
from shoal.placement import Box

GPT2 = Model(
    layers=11, hidden=6, heads=3, ffn=10, vocab=13, max_positions=5, norm="layer", positions="learned", tied=True,
    activation="gelu-tanh", gated=False, qkv_bias=True, out_bias=True, ffn_bias=True,
)  # fmt: skip
QWEN3 = Model(layers=1, hidden=6, heads=3, kv_heads=1, head_dim=4, ffn=10, vocab=13, qk_norm=True)


def test_gpt2_fuses_and_transposes() -> None:
    shapes = logical_shapes(GPT2)
    stored = {one.name: one for one in stored_tensors(FAMILIES["gpt2"], shapes, GPT2)}
    assert len(stored) == 2 + 11 * 12 + 2
    assert [name for name in stored if ".h." in name][::12] == [f"transformer.h.{i}.ln_1.weight" for i in range(11)]
    fused = stored["transformer.h.10.attn.c_attn.weight"]
    assert (fused.shape, fused.transposed) == ((6, 18), True)
    assert fused.parts == tuple((f"blocks.10.attn.{part}.weight", 6) for part in "qkv")
    assert stored["transformer.h.3.attn.c_attn.bias"].shape == (18,)
    assert stored["transformer.h.3.mlp.c_fc.weight"].shape == (6, 10)
    assert stored["transformer.wpe.weight"].shape == (5, 6)
    assert not stored["transformer.wte.weight"].transposed


@pytest.mark.parametrize("box", [((0, 6), (0, 6)), ((2, 5), (1, 3)), ((5, 6), (0, 6)), ((3, 3), (0, 6))])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_box_of_a_part_is_a_region_of_the_whole(part: str, box: Box) -> None:
    stored = {one.name: one for one in stored_tensors(FAMILIES["gpt2"], logical_shapes(GPT2), GPT2)}
    fused = stored["transformer.h.0.attn.c_attn.weight"]
    parts = torch.arange(108.0).view(3, 6, 6)
    theirs = parts.flatten(0, 1).t()
    ours = parts["qkv".index(part)][tuple(slice(*span) for span in box)]
    assert torch.equal(theirs[fused.region(f"blocks.0.attn.{part}.weight", box)].t(), ours)


def model_of(family: str) -> Model:
    """One that the family can be."""
    sizes = {"layers": 3, "hidden": 8, "heads": 2, "ffn": 10, "vocab": 13}
    some = {"experts": 4, "expert_ffn": 5, "shared_experts": 1, "dense_layers": 1}
    latent = {"rank": 5, "query_rank": 6, "plain_dim": 3, "turned_dim": 4, "value_dim": 2}
    return {
        "gpt2": GPT2,
        "mixtral": Model(**sizes, experts=4, gate="topk-softmax"),
        "qwen3_moe": Model(**sizes, qk_norm=True, experts=4, expert_ffn=5, dense_layers=1),
        "olmoe": Model(**sizes, qk_norm=True, qk_norm_over="all", experts=4),
        "deepseek_v2": Model(**sizes, **some, latent={**latent, "query_rank": None}),
        "deepseek_v3": Model(**sizes, **some, latent=latent, gate="sigmoid"),
    }.get(family, QWEN3)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_names_go_both_ways_for_every_family(family: Family) -> None:
    model = model_of(family.name)
    shapes = logical_shapes(model)
    stored = stored_tensors(family, shapes, model)
    assert sorted(part for one in stored for part, _ in one.parts) == sorted(shapes)
    assert len({one.name for one in stored}) == len(stored)


def test_a_logical_tensor_is_a_part_of_one_that_is_fused_and_a_tied_one_is_none() -> None:
    assert logical_shapes(QWEN3)["blocks.0.attn.k.weight"] == (4, 6)
    assert "head.out.weight" not in logical_shapes(GPT2)


def test_every_expert_has_tensors_of_its_own_and_the_bias_of_a_gate_keeps_its_dtype() -> None:
    model = model_of("deepseek_v3")
    stored = {one.name: one for one in stored_tensors(FAMILIES["deepseek_v3"], logical_shapes(model), model)}
    one = stored["model.layers.2.mlp.experts.3.up_proj.weight"]
    assert (one.shape, one.parts) == ((5, 8), (("blocks.2.ffn.experts.3.up.weight", 5),))
    assert "model.layers.0.mlp.experts.0.up_proj.weight" not in stored, "the first layer has none"
    assert [one.name for one in stored.values() if one.exact] == [
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)
    ]


@pytest.mark.parametrize("span", [(0, 14), (2, 9), (5, 6), (10, 14)])
def test_pairs_side_by_side_become_two_halves(span: tuple[int, int]) -> None:
    """Of heads of seven rows the last four turn, as (3, 4), (5, 6) in the file: first those that come first."""
    here = [0, 1, 2, 3, 5, 4, 6, 7, 8, 9, 10, 12, 11, 13]
    model = model_of("deepseek_v3")
    stored = {one.name: one for one in stored_tensors(FAMILIES["deepseek_v3"], logical_shapes(model), model)}
    order = stored["model.layers.1.self_attn.q_b_proj.weight"].order("blocks.1.attn.q_up.weight", span)
    assert order is not None
    assert order.tolist() == here[slice(*span)]
    down = stored["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    assert down.parts == (("blocks.1.attn.kv_down.weight", 5), ("blocks.1.attn.k_turned.weight", 4))
    assert down.order("blocks.1.attn.kv_down.weight", (0, 5)) is None
    turned = down.order("blocks.1.attn.k_turned.weight", (1, 4))
    assert turned is not None
    assert turned.tolist() == [2, 1, 3]
