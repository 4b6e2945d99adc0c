"""Where a logical tensor lies in one of theirs, fused and transposed as it may be."""

from __future__ import annotations

import pytest
import torch

from shoal.config import Model
from shoal.model.hf import FAMILIES, logical_shapes, stored_tensors
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


def test_names_go_both_ways_for_every_family() -> None:
    for family in FAMILIES.values():
        shapes = logical_shapes(GPT2 if family.name == "gpt2" else QWEN3)
        stored = stored_tensors(family, shapes)
        assert sorted(part for one in stored for part, _ in one.parts) == sorted(shapes)
        assert len({one.name for one in stored}) == len(stored)
    assert logical_shapes(QWEN3)["blocks.0.attn.k.weight"] == (4, 6)
    assert "head.out.weight" not in logical_shapes(GPT2)
