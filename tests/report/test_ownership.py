"""Who holds what, beside what engines on real ranks hold."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod
from typing import Any

import pytest
import torch

from shoal import config
from shoal.build import stages_of
from shoal.comm.world import World
from shoal.config import Config
from shoal.data_parallel.shelves import DeviceShelf, Found
from shoal.layout import Layout
from shoal.memory.homes import DiskHome, Homes, HostHome
from shoal.mesh import Coords, Grid
from shoal.pipeline.stages import cut
from shoal.placement import Box, Placement, Rule
from shoal.report.example import example
from shoal.report.ownership import MANY, Ownership, ownership, shown
from shoal.train.pool import Pool
from shoal.train.setup import fit, make_engine, make_model, open_data

UNEVEN = {"layers": 3, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 13, "vocab": 31}

LAYOUTS = [
    "dp=2", "dp=4,zero=1", "dp=3,zero=2", "dp=4,zero=3", "dp=4,zero=2/2", "dp=4,zero=3/2", "tp=4", "tp=4:1d-sp",
    "dp=2,tp=2:1d-sp,zero=1", "dp=2,tp=2,zero=3", "pp=3,mb=3", "pp=2,tp=2,mb=2", "pp=2:gpipe,dp=2,zero=2,mb=2",
    "dp=3,sync=server", "dp=4,sync=server/3", "pp=2,dp=2,sync=server,mb=2", "dp=2,tp=2:1d-sp,sync=server{stale=1}",
    "pp=2,dp=2,zero=3,mb=2", "pp=2{layers=1/2},tp=2:1d-sp", "pp=1:interleaved,mb=2", "pp=1:breadth-first/3,dp=2,zero=3",
    "pp=2:zb-h1,dp=2,zero=1,mb=2", "pp=3:2bw,mb=2", "pp=2:2bw,tp=2,mb=2",
    "tp=4:2d", "tp=4:1x2x2", "tp=4:2x2x1,zero=1", "tp=4:2x1x2,zero=3", "dp=2,tp=2:2x1x1,zero=2", "tp=2:2.5d/2,zero=1",
    "dp=2,tp=2:2.5d/2,zero=3/2", "pp=2,tp=2:1x2x1,mb=2",
]  # fmt: skip
SEVERAL = [
    "pp=2:zb-v,mb=4",
    "pp=2:interleaved,dp=2,zero=3,mb=2",
    "pp=2:dualpipe-v,tp=2,mb=4",
    "pp=2:list/2,mb=3",
    "pp=2:breadth-first,dp=2,zero=1,mb=2",
]
"""Of several stages a rank, for a model of four blocks."""
LARGE = [
    "dp=64,zero=3",
    "dp=8,tp=8:1d-sp,zero=1",
    "dp=4,tp=4,pp=4,zero=3,mb=4",
    "tp=8,pp=8,mb=8",
    "dp=32,pp=2,zero=2/8",
    "tp=16:2d",
    "dp=2,tp=8:2.5d,zero=3",
    "dp=2,tp=8:3d,zero=2",
    "pp=2,tp=16:2.5d/4,zero=1/2,mb=2",
    "pp=4:zb-v,dp=2,zero=2,mb=4",
    "pp=2:interleaved/4,tp=8:3d,mb=4",
    "pp=4:breadth-first,dp=8,zero=3,mb=4",
]


def run_of(layout: Layout, model: dict[str, Any] | None = None) -> Config:
    given = example(layout)
    return given if model is None else given.model_copy(update={"model": config.Model(**model)})


@cache
def owned(line: str, tied: bool = False) -> Ownership:
    layout = Layout.parse(line)
    run = run_of(layout, sizes(line, tied))
    return ownership(make_model(run, layout), layout)


@cache
def large(line: str) -> Ownership:
    layout = Layout.parse(line)
    return ownership(make_model(run_of(layout), layout), layout)


Boxes = set[tuple[str, str, Box]]


def sizes(line: str, tied: bool) -> dict[str, Any]:
    return {**UNEVEN, "layers": 4 if line in SEVERAL else 3, "tied": tied}


def what_it_has(world: World, line: str, tied: bool) -> Boxes:
    layout = Layout.parse(line)
    engine = make_engine(run_of(layout, sizes(line, tied)), layout, world)
    return {(one.kind, one.piece.name, one.piece.box) for one in engine.fragments() if one.tensor.numel()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("line", LAYOUTS + SEVERAL)
def test_it_is_what_the_ranks_of_an_engine_hold(pool: Pool, line: str, tied: bool) -> None:
    found: list[Boxes] = [set() for _ in range(Layout.parse(line).ranks)]
    for one in owned(line, tied).held:
        for kinds, shares in ((("weight",), one.shares), (("exp_avg", "exp_avg_sq"), one.states)):
            for share in shares:
                for rank in share.ranks:
                    found[rank] |= {(kind, one.weight, box) for kind in kinds for box in share.boxes}
    assert found == pool.run(what_it_has, line, tied, ranks=len(found))


@pytest.mark.parametrize("line", LAYOUTS + SEVERAL + LARGE)
def test_a_place_has_each_element_of_its_tensors_exactly_once(line: str) -> None:
    """A share is all the ranks with these boxes, so shares never overlap."""
    everything = large(line) if line in LARGE else owned(line)
    for one in everything.held:
        for kind in ("weight", "state"):
            times = torch.zeros(one.shape, dtype=torch.int32)
            for share in one.of(kind):
                assert set(share.ranks) <= set(everything.ranks_at(one.place))
                assert share.numel == sum(_at(times, box).numel() for box in share.boxes)
                for box in share.boxes:
                    _at(times, box).add_(1)
            assert times.eq(1).all(), f"{kind} {one.weight} at place {one.place}"


def _at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


@pytest.mark.parametrize(
    "line", [line for line in LAYOUTS + SEVERAL + LARGE if "tp" not in line and "server" not in line]
)
def test_ranks_divide_a_place_as_zero_says(line: str) -> None:
    everything = large(line) if line in LARGE else owned(line)
    layout = everything.layout
    group = (layout.zero_group or layout.dp) if layout.zero else 1
    for place in range(layout.pp):
        size = sum(one.numel for one in everything.held if one.place == place)
        # Each bucket is rounded up to a multiple of the ranks that divide it.
        rounding = group * (len(everything.units_at(place)) if layout.zero == 3 else 1)
        for rank in everything.ranks_at(place):
            weights, states = everything.count(rank, "weight"), everything.count(rank, "state")
            assert abs(states - size / group) <= rounding * (group > 1)
            assert weights == (states if layout.zero == 3 else size)


def test_a_tied_embedding_is_on_both_ends_of_a_pipeline() -> None:
    found = [one for one in owned("pp=3,mb=3", tied=True).held if one.weight == "embed.table.weight"]
    assert [(one.place, one.unit, one.label, one.shares[0].ranks) for one in found] == [
        (0, 0, "table", (0,)),
        (2, 4, "embed.table", (2,)),
    ]
    assert owned("pp=3,mb=3", tied=True).elements == owned("pp=3,mb=3").elements - 31 * 24


def test_under_a_v_a_rank_holds_the_first_stage_and_the_last_and_a_tied_embedding_once() -> None:
    everything = owned("pp=2:zb-v,mb=4", tied=True)
    assert everything.homes == (0, 1, 1, 0)
    assert [everything.stages_at(place) for place in (0, 1)] == [(0, 3), (1, 2)]
    assert [everything.units_at(place) for place in (0, 1)] == [[0, 1, 4, 5], [2, 3]]
    (table,) = [one for one in everything.held if one.weight == "embed.table.weight"]
    assert (table.place, table.unit, table.shares[0].ranks) == (0, 0, (0,))
    stages = {one["weight"]: one["stage"] for one in everything.as_json()}
    assert [stages[f"blocks.{block}.ffn.up.weight"] for block in range(4)] == [0, 1, 2, 3]
    assert (stages["embed.table.weight"], stages["head.norm.weight"]) == (0, 3)
    assert [section.units for section in everything.sections(0, "weight")] == [(0,), (1, 4), (5,)]
    assert everything.cost_share(0) + everything.cost_share(1) == pytest.approx(1)


def test_key_value_heads_that_several_ranks_have_are_one_share() -> None:
    (keys,) = [one for one in owned("tp=4").held if one.weight == "blocks.1.attn.k.weight"]
    assert [(share.ranks, share.boxes) for share in keys.shares] == [
        ((0, 1), (((0, 6), (0, 24)),)),
        ((2, 3), (((6, 12), (0, 24)),)),
    ]


@pytest.mark.parametrize("line", [line for line in LAYOUTS if "server" in line and "tp" not in line])
def test_servers_divide_the_states_of_a_place(line: str) -> None:
    everything = owned(line)
    layout, grid = everything.layout, everything.grid
    assert layout.servers is not None
    for place in range(layout.pp):
        size = sum(one.numel for one in everything.held if one.place == place)
        for rank in everything.ranks_at(place):
            assert everything.count(rank, "weight") == size
            states = everything.count(rank, "state")
            serves = grid.coords(rank)["dp"] < layout.servers
            assert abs(states - serves * size / layout.servers) <= layout.servers


@pytest.mark.parametrize("line", ["pp=2,mb=2", "pp=3,mb=3", "pp=2,tp=2,mb=2"])
def test_costs_are_those_that_stages_balance(line: str) -> None:
    everything, layout = owned(line), Layout.parse(line)
    model = make_model(run_of(layout, UNEVEN), layout)
    assert cut(everything.costs, layout.pp) == everything.stages == stages_of(layout, model.layers(), model.roles)
    assert everything.costs[0] == 0
    assert sum(everything.cost_share(stage) for stage in range(layout.pp)) == pytest.approx(1)
    first = sum(everything.costs[unit] for unit in everything.stages[0])
    assert everything.cost_share(0) == pytest.approx(first / (everything.elements - 31 * 24))


def test_layers_that_are_held_alike_are_one_section() -> None:
    everything = owned("dp=4,zero=1")
    assert [section.units for section in everything.sections(0, "weight")] == [(0,), (1, 2, 3), (4,)]
    states = everything.sections(0, "state")
    assert sum((section.units for section in states), ()) == tuple(range(5))
    assert len(states) > 3, "a bucket of several layers is divided somewhere in one of them"
    assert [one.label for one in states[1].held] == [
        "attn_norm", "attn.q", "attn.k", "attn.v", "attn.out", "ffn_norm", "ffn.gate", "ffn.up", "ffn.down",
    ]  # fmt: skip


def test_a_section_knows_who_updates_all_of_it() -> None:
    assert [section.updaters for section in owned("dp=2").sections(0, "weight")] == [(0, 1)] * 3
    embed, first, *_, head = large("dp=2,tp=8:2.5d,zero=1").sections(0, "state")
    assert (embed.updaters, first.updaters, head.updaters) == ((12, 13, 14, 15), (12, 13, 14, 15), (0, 1, 2, 3))
    embed, *_, head = large("dp=2,tp=8:3d,zero=2").sections(0, "state")
    assert embed.updaters == tuple(range(8, 16))
    assert head.updaters is None, "vectors are divided over a, so that its norm is elsewhere"
    layout = Layout.parse("dp=80,zero=3")
    part = ownership(make_model(run_of(layout), layout), layout, shown(layout))
    assert [section.updaters for section in part.sections(0, "state")] == [None] * 3


def test_who_holds_which_block_of_a_grid() -> None:
    def holders(line: str, weight: str) -> list[tuple[tuple[int, ...], Box]]:
        (found,) = [one for one in large(line).held if one.weight == weight]
        return [(share.ranks, share.boxes[0]) for share in found.shares]

    left, right, first, second = (0, 32), (32, 64), (0, 80), (80, 160)
    assert holders("tp=4:2d", "blocks.0.ffn.gate.weight") == [
        ((0,), (first, left)), ((2,), (first, right)), ((1,), (second, left)), ((3,), (second, right)),
    ]  # fmt: skip
    assert holders("tp=8:2.5d", "blocks.0.ffn.down.weight") == [
        ((0, 4), (left, first)), ((2, 6), (left, second)), ((1, 5), (right, first)), ((3, 7), (right, second)),
    ]  # fmt: skip
    assert holders("tp=8:3d", "blocks.0.attn.out.weight") == [
        ((rank,), (rows, (at, at + 16)))
        for rows, ranks in ((left, (0, 4, 1, 5)), (right, (2, 6, 3, 7)))
        for rank, at in zip(ranks, range(0, 64, 16), strict=True)
    ]
    assert holders("tp=8:3d", "blocks.0.ffn_norm.weight") == [((0, 1, 4, 5), (left,)), ((2, 3, 6, 7), (right,))]


def test_of_many_ranks_the_first_replica_is_shown_and_holds_what_it_holds_among_all() -> None:
    assert shown(Layout.parse("dp=16,tp=4")) == tuple(range(MANY))
    layout = Layout.parse("pp=2,dp=9,tp=4,zero=3,mb=2")
    assert shown(layout) == (0, 1, 2, 3, 36, 37, 38, 39)
    model = make_model(run_of(layout), layout)
    part, everything = ownership(model, layout, shown(layout)), ownership(model, layout)
    assert part.is_part
    assert not everything.is_part
    assert (part.replicas, part.elements) == (9, everything.elements)
    for some, full in zip(part.held, everything.held, strict=True):
        restricted = [
            (ranks, share.boxes)
            for share in full.shares
            if (ranks := tuple(rank for rank in share.ranks if rank in part.ranks))
        ]
        assert [(share.ranks, share.boxes) for share in some.shares] == restricted


def test_what_it_asks_of_a_layout_grows_with_its_ranks_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, asked, at = Layout.parse("tp=64:4x4x4"), 0, Rule.at

    def counted(rule: Rule, coords: Coords) -> Placement | None:
        nonlocal asked
        asked += 1
        return at(rule, coords)

    model = make_model(run_of(layout), layout)
    monkeypatch.setattr(Rule, "at", counted)
    assert len(ownership(model, layout).ranks) == 64
    assert asked <= 3 * 64 * len(list(model.parameters()))


def test_json_has_every_box() -> None:
    boxes = owned("dp=2,tp=2,zero=3").as_json()
    assert all(set(one) == {"weight", "shape", "kind", "box", "ranks", "stage"} for one in boxes)
    covered = dict.fromkeys(("weight", "state"), 0)
    for one in boxes:
        covered[one["kind"]] += prod(stop - start for start, stop in one["box"])
    assert covered["weight"] == covered["state"] == owned("dp=2,tp=2,zero=3").elements


def test_a_model_of_any_size_takes_no_memory() -> None:
    layout = fit(run_of(Layout.parse("tp=8,pp=2,mb=2")), Layout.parse("tp=8,pp=2,mb=2"), 16)
    huge = {"layers": 4, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256}
    model = make_model(run_of(layout, huge), layout)
    found = ownership(model, layout)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert found.elements == sum(parameter.numel() for parameter in model.parameters()) > 16e9
    assert max(found.count(rank, "weight") for rank in range(16)) < found.elements / 8


def test_ranks_are_those_of_the_grid() -> None:
    everything = large("dp=4,tp=4,pp=4,zero=3,mb=4")
    assert everything.grid == Grid((("pp", 4), ("dp", 4), ("cp", 1), ("tp", 4)))
    assert [everything.ranks_at(place) for place in range(4)] == [
        tuple(range(16 * place, 16 * place + 16)) for place in range(4)
    ]


AWAY = [
    "dtype=bf16",
    "dp=2,zero=2,dtype=bf16",
    "dp=2,zero=3",
    "dp=2,offload=optimizer:cpu",
    "dp=2,zero=1,dtype=bf16,offload=optimizer:cpu@0.4",
    "dtype=bf16{grads=bf16},offload=optimizer:nvme+params:nvme",
    "dp=2,dtype=bf16,offload=optimizer:nvme+params:cpu@0.5+grads:cpu",
    "dp=2,zero=3,offload=params:cpu",
    "offload=grads:cpu",
]


@pytest.mark.parametrize("line", AWAY)
def test_bytes_by_place_are_those_of_an_engine(line: str, pool: Pool) -> None:
    seen = owned(line)
    ranks = pool.run(kept, line, ranks=seen.layout.ranks)
    for rank, (device, host, disk) in enumerate(ranks):
        found = seen.bytes[rank]
        assert (found["cpu"], found["nvme"]) == (host, disk), rank
        assert found["device"] == pytest.approx(device, rel=0.01), "parts are padded"


def kept(world: World, line: str) -> tuple[int, int, int]:
    """Bytes of model states between steps on the device and on the host, and in the file."""
    layout, away = Layout.parse(line), Counter[str]()
    config, keep = run_of(layout, sizes(line, False)), Homes.keep

    def counted(self: Homes, where: str, values: torch.Tensor, part: str) -> HostHome | DiskHome:
        away[where] += values.nbytes
        return keep(self, where, values, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Homes, "keep", counted)
        engine = make_engine(config, layout, world)
    engine.step(open_data(config).batch(0, engine.mesh.coords["dp"], layout.dp))
    engine.drain()
    tensors, passing = list[torch.Tensor](), 0
    for flat in engine._sync.flats:
        tensors += [flat.params, flat.own_params, flat.masters, flat.grads, flat.own_grads, *flat.states.values()]
        passing += 0 if flat.buffered else flat.params.nbytes  # gradients
        for shelf in flat.stowage.shelves:
            if isinstance(shelf, DeviceShelf):
                tensors += shelf.states.values()
                tensors += [shelf.masters.tensor] if flat.stowage.apart and isinstance(shelf.masters, Found) else []
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values()) + passing, away["cpu"], away["nvme"]
