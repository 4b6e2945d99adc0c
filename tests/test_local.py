from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from shoal.comm.world import World
from shoal.config import Model
from shoal.local import (
    Interpreter,
    LocalParameter,
    adapt,
    allot,
    buffer_fragments,
    drop,
    lay_out,
    materialise,
    settle,
)
from shoal.mesh import Grid, Mesh
from shoal.model.decoder import Decoder
from shoal.model.roles import Role
from shoal.placement import Piece, Placement, Rule
from shoal.tensor.whole import Whole

GRID = Grid((("dp", 2),))
CPU = torch.device("cpu")


def decoder(tied: bool) -> Decoder:
    with torch.device("meta"):
        return Decoder(Model(layers=2, hidden=8, heads=2, kv_heads=1, ffn=6, vocab=10, tied=tied))


def held_by(model: Decoder) -> dict[str, LocalParameter]:
    found = lay_out(model, model.layers(), model.roles, Whole(), GRID, {"dp": 1})
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


def made(model: Decoder, how: Interpreter | None = None, rank: int = 0) -> dict[str, LocalParameter]:
    laid_out = lay_out(model, model.layers(), model.roles, how or Whole(), GRID, {"dp": rank})
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


STAGES = (range(2), range(2, 4))


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_holds_what_its_layers_use_and_shares_what_others_use_too(tied: bool) -> None:
    """A shared parameter belongs to the first of a stage's own layers that uses it."""
    grid, held = Grid((("pp", 2), ("dp", 2))), []
    for stage in range(2):
        model = decoder(tied)
        coords = {"pp": stage, "dp": 1}
        found = lay_out(model, model.layers(), model.roles, Whole(), grid, coords, STAGES)
        held.append({one.name: one for one in found})
        assert {one.unit for one in found} == set(STAGES[stage])
    shared = {"embed.table.weight"} if tied else set()
    assert held[0].keys() & held[1].keys() == shared
    assert held[0].keys() | held[1].keys() == held_by(decoder(tied)).keys()
    for stage, ones in enumerate(held):
        for name, one in ones.items():
            copies = (0, 1, 2, 3) if name in shared else (2 * stage, 2 * stage + 1)
            assert all(who.copies == who.summing == copies for who in one.holders)
    if tied:
        assert [ones["embed.table.weight"].unit for ones in held] == [0, 3]


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_allotted_has_its_shape_and_no_memory_until_it_is_settled(tied: bool) -> None:
    """Its values are those that it would have had at once, drawn as often as one asks."""
    model, other = decoder(tied), decoder(tied)
    model.blocks[1].ffn.down.weight.requires_grad_(False)
    laid_out = lay_out(model, model.layers(), model.roles, Whole(), GRID, {"dp": 0})
    allotted = allot(model, laid_out, 3, CPU)
    expected = made(other)
    assert [one.name for one in allotted] == list(expected)
    for one in allotted:
        dtype = one.parameter.dtype
        assert model.get_parameter(one.name) is one.parameter
        assert one.parameter.shape == expected[one.name].parameter.shape
        assert one.parameter.untyped_storage().nbytes() == 4
        assert one.parameter.requires_grad == (one.name != "blocks.1.ffn.down.weight")
        assert torch.equal(one.values(dtype), expected[one.name].values(dtype))
        assert torch.equal(one.values(dtype), expected[one.name].parameter)
        settled = settle(one)
        assert settled.parameter is one.parameter
        assert torch.equal(one.parameter, settled.values(dtype))
        assert settled.values(dtype).data_ptr() == one.parameter.data_ptr(), "its own from now on"
    assert (model.head.out.weight is model.embed.table.weight) == tied


class ByRows(Whole):
    """Matrices divided by rows over dp, vectors whole."""

    def place(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        if len(shape) == 1:
            return super().place(role, module, parameter, shape)

        def at(coords: object) -> Placement:
            half, start = shape[0] // 2, shape[0] // 2 * coords["dp"]  # type: ignore[index]
            box = ((start, start + half), (0, shape[1]))
            piece = Piece(f"{module}.{parameter}", tuple(shape), box, ((0, half), box[1]))
            return Placement((half, shape[1]), (piece,))

        return Rule(at, frozenset({"dp"}))


def test_each_rank_makes_only_its_part_of_the_same_weights() -> None:
    whole, *halves = (decoder(False) for _ in range(3))
    for model in (whole, *halves):
        model.roles = {}  # no fused parts: rows are then numbered through each matrix
    made(whole)
    for rank, half in enumerate(halves):
        for one in made(half, ByRows(), rank).values():
            (piece,) = one.placement.pieces
            assert piece.shape == dict(whole.named_parameters())[one.name].shape, "the logical shape, not the local"
            assert one.holders[0].copies == ((rank,) if len(piece.shape) > 1 else (0, 1))
    for (name, full), (_, low), (_, high) in zip(*(m.named_parameters() for m in (whole, *halves)), strict=True):
        both = torch.cat([low, high]) if full.ndim > 1 else low
        assert torch.equal(full, both), name


def test_a_dropped_layer_keeps_only_the_modules_that_others_share() -> None:
    shared = nn.BatchNorm1d(3)
    first, second = nn.Sequential(nn.Linear(3, 3), shared, nn.BatchNorm1d(3)), nn.Sequential(shared)
    second.append(nn.Linear(3, 3))
    second[1].weight = first[0].weight  # the parameter is shared, its module is not
    drop(first, [second])
    assert [name for name, _ in first.named_parameters()] == ["1.weight", "1.bias"]
    assert [name for name, _ in first.named_buffers()] == [f"1.{name}" for name, _ in shared.named_buffers()]
    assert first[0].weight is None, "an attribute still, as a module without a bias has one"
    assert len(list(second.parameters())) == 4
    with pytest.raises(TypeError):
        first[0](torch.ones(1, 3))


class Renamed(nn.Module):
    """Takes the place of a module of one kind of role."""

    def __init__(self, role: Role, inner: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self.role, self.inner, self.mesh = role, inner, mesh


class Renaming(Whole):
    def adapt(self, role: Role, module: nn.Module, mesh: Mesh) -> nn.Module:
        return Renamed(role, module, mesh) if role.kind in ("qkv", "norm") else module


def test_modules_are_replaced_by_their_role() -> None:
    model, mesh = decoder(False), Mesh((("dp", 1),), World())
    before = dict(model.named_modules())
    for name, layer in model.layers():
        adapt(name, layer, model.roles, Renaming(), mesh)
    found = {name: one for name, one in model.named_modules() if isinstance(one, Renamed)}
    norms = [f"blocks.{i}.{norm}" for i in range(2) for norm in ("attn_norm", "ffn_norm")]
    assert set(found) == {*norms, "blocks.0.attn.qkv", "blocks.1.attn.qkv", "head.norm"}
    for name, one in found.items():
        assert (one.inner, one.mesh) == (before[name], mesh)
        assert one.role.kind == ("qkv" if name.endswith("qkv") else "norm")
    assert all(before[name] is one for name, one in model.named_modules() if name in before.keys() - found.keys())
    for name, layer in model.layers():
        adapt(name, layer, model.roles, Whole(), mesh)
    assert {name for name, one in model.named_modules() if isinstance(one, Renamed)} == set(found)


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
