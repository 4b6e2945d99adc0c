from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from shoal.config import Model
from shoal.local import LocalParameter, Place, buffer_fragments, lay_out, materialise
from shoal.mesh import Grid
from shoal.model.decoder import Decoder
from shoal.model.roles import Role
from shoal.placement import Piece, Placement, Rule
from shoal.tensor.whole import place

GRID = Grid((("dp", 2),))
CPU = torch.device("cpu")


def decoder(tied: bool) -> Decoder:
    with torch.device("meta"):
        return Decoder(Model(layers=2, hidden=8, heads=2, kv_heads=1, ffn=6, vocab=10, tied=tied))


def held_by(model: Decoder) -> dict[str, LocalParameter]:
    found = lay_out(model, model.layers(), model.roles, place, GRID, {"dp": 1})
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


def made(model: Decoder, where: Place = place, rank: int = 0) -> dict[str, LocalParameter]:
    laid_out = lay_out(model, model.layers(), model.roles, where, GRID, {"dp": rank})
    return {one.name: one for one in materialise(model, laid_out, 3, CPU)}


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_held_once_under_the_unit_that_completes_it(tied: bool) -> None:
    held = held_by(decoder(tied))
    units = {name: one.unit for name, one in held.items()}
    assert {name for name in units if name.startswith("blocks.1.")} == {n for n, unit in units.items() if unit == 2}
    assert units["embed.table.weight"] == 0, "a tied weight is complete only when backward has reached the embedding"
    assert units["head.norm.weight"] == 3
    assert ("head.out.weight" in units) != tied
    assert all(one.holders[0].summing == (0, 1) for one in held.values())


def test_matrices_decay_and_vectors_do_not() -> None:
    assert {name for name, one in held_by(decoder(False)).items() if not one.decays} == {
        *(f"blocks.{i}.{norm}.weight" for i in (0, 1) for norm in ("attn_norm", "ffn_norm")),
        "head.norm.weight",
    }


def test_a_fused_parameter_yields_a_view_for_each_logical_weight() -> None:
    model = decoder(False)
    fused = made(model)["blocks.0.attn.qkv.weight"]
    assert fused.parameter is model.blocks[0].attn.qkv.weight
    parts = fused.fragments("weight", fused.parameter.detach())
    assert [(h.piece.name, tuple(h.tensor.shape)) for h in parts] == [
        ("blocks.0.attn.q.weight", (8, 8)),
        ("blocks.0.attn.k.weight", (4, 8)),
        ("blocks.0.attn.v.weight", (4, 8)),
    ]
    parts[1].tensor.fill_(7.0)
    assert fused.parameter[8:12].eq(7).all()
    assert not fused.parameter[:8].eq(7).any()


@pytest.mark.parametrize("tied", [False, True])
def test_materialising_fills_what_is_on_meta_and_keeps_the_rest(tied: bool) -> None:
    model = decoder(tied).to(torch.float64)
    model.head.norm = nn.RMSNorm(8)
    model.head.norm.weight.data.fill_(5.0)
    mine = model.head.norm.weight
    model.blocks[1].ffn.down.weight.requires_grad_(False)
    made(model)
    assert not any(p.is_meta for p in model.parameters())
    assert (model.head.out.weight is model.embed.table.weight) == tied
    assert model.embed.table.weight.dtype == torch.float64
    assert model.head.norm.weight is mine
    assert mine.eq(5).all()
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["blocks.1.ffn.down.weight"]


def by_rows(role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
    """Matrices divided by rows over dp, vectors whole."""
    if len(shape) == 1:
        return place(role, module, parameter, shape)

    def at(coords: object) -> Placement:
        half, start = shape[0] // 2, shape[0] // 2 * coords["dp"]  # type: ignore[index]
        box = ((start, start + half), (0, shape[1]))
        return Placement((half, shape[1]), (Piece(f"{module}.{parameter}", tuple(shape), box, ((0, half), box[1])),))

    return Rule(at, frozenset({"dp"}))


def test_each_rank_makes_only_its_part_of_the_same_weights() -> None:
    whole, *halves = (decoder(False) for _ in range(3))
    for model in (whole, *halves):
        model.roles = {}  # no fused parts: rows are then numbered through each matrix
    made(whole)
    for rank, half in enumerate(halves):
        for one in made(half, by_rows, rank).values():
            (piece,) = one.placement.pieces
            assert piece.shape == dict(whole.named_parameters())[one.name].shape, "the logical shape, not the local"
            assert one.holders[0].copies == ((rank,) if len(piece.shape) > 1 else (0, 1))
    for (name, full), (_, low), (_, high) in zip(*(m.named_parameters() for m in (whole, *halves)), strict=True):
        both = torch.cat([low, high]) if full.ndim > 1 else low
        assert torch.equal(full, both), name


def test_buffers_that_belong_in_a_checkpoint_are_held_whole_and_as_views() -> None:
    class Leaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

    module = nn.Sequential(nn.BatchNorm1d(3), Leaf())
    found = {h.piece.name: h for h in buffer_fragments(module, range(2))}
    assert set(found) == {"0.running_mean", "0.running_var", "0.num_batches_tracked", "1.mean"}
    assert all(h.copies == (0, 1) for h in found.values())
    found["1.mean"].tensor.fill_(4.0)
    assert module[1].mean.eq(4).all()
