from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

import pytest

from shoal.errors import LayoutError
from shoal.layout import Layout, kinds


@dataclass(frozen=True)
class Shape:
    """A model of the usual small sizes."""

    layers: int = 8
    hidden: int = 48
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 61
    vocab: int = 257
    experts: int = 0
    tied: bool = False


def refused(line: str) -> str:
    with pytest.raises(LayoutError) as error:
        Layout.parse(line)
    return str(error.value)


def named_values(message: str) -> list[str]:
    """The KEY=VALUE pairs that a message offers after its last "use"."""
    offers = message.rsplit("use ", 1)[1].split(" or ")
    return [offer for offer in offers if "=" in offer]


def with_value(line: str, pair: str) -> str:
    """``line`` with the key of ``pair`` set to its value."""
    key = pair.partition("=")[0]
    items = [item for item in line.split(",") if item and item.partition("=")[0] != key]
    return ",".join([*items, pair])


# (line, what else is unusual, setting, value as printed, legal values named)
REFUSALS = [
    # heads, hidden size, experts
    ("tp=3", {}, "tp", "3", ["tp=2", "tp=4"]),
    ("tp=6:1d-sp", {"heads": 12, "kv_heads": 4}, "tp", "6:1d-sp", ["tp=4:1d-sp", "tp=12:1d-sp"]),
    ("tp=9:2d", {}, "tp", "9:2d", ["tp=4:2d", "tp=16:2d"]),
    ("tp=18:2.5d/2", {}, "tp", "18:2.5d", ["tp=8:2.5d", "tp=32:2.5d"]),
    ("tp=27:3d", {}, "tp", "27:3d", ["tp=8:3d", "tp=64:3d"]),
    ("tp=6:1x2x3", {}, "tp", "6:1x2x3", ["tp=4:1x2x2", "tp=8:1x2x4"]),
    ("tp=4:2d", {"hidden": 27}, "tp", "4:2d", ["tp=1:2d"]),
    ("tp=16:2d", {"vocab": 3}, "tp", "16:2d", ["tp=4:2d"]),
    ("tp=4:1x1x4", {"vocab": 3}, "tp", "4:1x1x4", ["tp=2:1x1x2"]),
    ("tp=10:1x5x2", {}, "tp", "10:1x5x2", ["tp=8:1x4x2", "tp=12:1x6x2"]),
    ("cp=3:ulysses", {}, "cp", "3:ulysses", ["cp=2:ulysses", "cp=4:ulysses"]),
    ("tp=4,cp=8:4x2", {}, "cp", "8:4x2", ["cp=4:2x2"]),
    ("dp=3,ep=3", {"experts": 8}, "ep", "3", ["ep=1"]),
    ("dp=2,ep=2", {}, "ep", "2", ["ep=1"]),
    ("dp=2,etp=2", {}, "etp", "2", ["etp=1"]),
    # batch
    ("dp=5", {"batch": 12}, "dp", "5", ["dp=4", "dp=6"]),
    ("dp=2,mb=4", {"batch": 12}, "mb", "4", ["mb=3", "mb=6"]),
    ("dp=2,pp=2:interleaved,mb=4", {"batch": 12}, "mb", "4", ["mb=2", "mb=6"]),
    # stages and layers
    ("pp=9", {}, "pp", "9", ["pp=8"]),
    ("pp=3:interleaved/3,mb=6", {}, "pp", "3:interleaved/3", ["pp=2:interleaved/3", "pp=3:interleaved"]),
    ("pp=2:list/5", {}, "pp", "2:list/5", ["pp=2:list/4"]),
    ("pp=8:interleaved,mb=8", {"layers": 8}, "pp", "8:interleaved", ["pp=4:interleaved", "pp=8:interleaved/1"]),
    ("pp=2:zb-v", {"layers": 2}, "pp", "2:zb-v", ["pp=1"]),
    ("pp=3{layers=4/2/3}", {}, "pp", "3{layers=4/2/3}", ["pp=3{layers=3/3/2}"]),
    ("pp=3{layers=6/2}", {}, "pp", "3{layers=6/2}", ["pp=3{layers=3/3/2}"]),
    ("pp=2{layers=8/0}", {}, "pp", "2{layers=8/0}", ["pp=2{layers=4/4}"]),
    ("pp=2,recompute=full{stages=1/2}", {}, "recompute", "full{stages=1/2}", ["recompute=full{stages=1}"]),
    ("pp=2:1f1b/2", {}, "pp", "2:1f1b/2", ["pp=2"]),
    ("pp=2:dualpipe-v/3,mb=8", {}, "pp", "2:dualpipe-v/3", ["pp=2:dualpipe-v"]),
    # times and memory
    ("pp=2{times=1/1/1/0}", {}, "pp", "2{times=1/1/1/0}", ["pp=2", "pp=2:list{times=1/1/1/0}"]),
    (
        "pp=2:interleaved{times=1/2/1/0;memory=2},mb=4",
        {},
        "pp",
        "2:interleaved{times=1/2/1/0;memory=2}",
        ["pp=2:interleaved", "pp=2:list/2{times=1/2/1/0;memory=2}"],
    ),
    ("pp=2:list{times=1/1/1}", {}, "pp", "2:list{times=1/1/1}", ["pp=2:list{times=1/1/1/0}"]),
    ("pp=2:list{times=0/0/0/1}", {}, "pp", "2:list{times=0/0/0/1}", ["pp=2:list{times=1/1/1/0}"]),
    ("pp=2:list{memory=0.5}", {}, "pp", "2:list{memory=0.5}", ["pp=2:list{memory=1}"]),
    ("pp=2:zb-v{memory=0.5},mb=4", {}, "pp", "2:zb-v{memory=0.5}", ["pp=2:zb-v", "pp=2:list/2{memory=1}"]),
    (
        "pp=2{times=0/0/0/1;memory=2}",
        {},
        "pp",
        "2{times=0/0/0/1;memory=2}",
        ["pp=2", "pp=2:list{times=1/1/1/0;memory=2}"],
    ),
    ("pp=2:list{times=1/1;memory=0}", {}, "pp", "2:list{times=1/1;memory=0}", ["pp=2:list{times=1/1/1/0;memory=1}"]),
    (
        "pp=2:list{layers=8/0;times=1/2/1/0;memory=2}",
        {},
        "pp",
        "2:list{layers=8/0;times=1/2/1/0;memory=2}",
        ["pp=2:list{layers=4/4;times=1/2/1/0;memory=2}"],
    ),
    (
        "pp=2:list{layers=4/3;times=1/2/1/0}",
        {},
        "pp",
        "2:list{layers=4/3;times=1/2/1/0}",
        ["pp=2:list{layers=4/4;times=1/2/1/0}"],
    ),
    # micro-batches a schedule does not admit
    ("pp=4:interleaved/2,mb=5", {}, "mb", "5", ["mb=4", "mb=8"]),
    ("pp=2:interleaved", {}, "mb", "1", ["mb=2"]),
    ("pp=2:dualpipe-v,mb=3", {}, "mb", "3", ["mb=4"]),
    ("pp=4:2bw,mb=2", {}, "mb", "2", ["mb=3"]),
    # grids of the wrong shape
    ("tp=6:2d", {"heads": 24, "kv_heads": 12}, "tp", "6:2d", ["tp=4:2d", "tp=9:2d"]),
    ("tp=6:2.5d", {}, "tp", "6:2.5d", ["tp=4:2.5d", "tp=8:2.5d"]),
    ("tp=8:2.5d/3", {}, "tp", "8:2.5d/3", ["tp=3:2.5d/3", "tp=12:2.5d/3"]),
    ("tp=9:3d", {"heads": 24, "kv_heads": 12}, "tp", "9:3d", ["tp=8:3d", "tp=27:3d"]),
    ("tp=6:2x2x2", {}, "tp", "6:2x2x2", ["tp=8:2x2x2", "tp=6:3x1x2"]),
    ("tp=12:2x2x2", {}, "tp", "12:2x2x2", ["tp=8:2x2x2", "tp=12:3x2x2"]),
    ("tp=4:2x2", {}, "tp", "4:2x2", ["tp=4:2x2x1"]),
    ("cp=6:2x2", {}, "cp", "6:2x2", ["cp=4:2x2"]),
    ("tp=4:3d{form=loop}", {}, "tp", "4:3d{form=loop}", ["tp=1:3d", "tp=8:3d"]),
    ("tp=8:3d{form=loop}", {}, "tp", "8:3d{form=loop}", ["tp=8:3d"]),
    ("tp=2{form=loop}", {}, "tp", "2{form=loop}", ["tp=2"]),
    # groups inside the ranks
    ("dp=6,zero=3/4", {}, "zero", "3/4", ["zero=3/3", "zero=3/6"]),
    ("dp=2,tp=8:2.5d,zero=3/3", {}, "zero", "3/3", ["zero=3/2", "zero=3/4"]),
    ("dp=2,tp=8:3d,zero=3/4", {}, "zero", "3/4", ["zero=3/2"]),
    ("dp=4,ep=3", {"experts": 12}, "ep", "3", ["ep=2", "ep=4"]),
    ("dp=4,etp=3", {"experts": 8}, "etp", "3", ["etp=2", "etp=4"]),
    ("dp=4,ep=4,etp=2", {"experts": 8}, "ep", "4", ["ep=2"]),
    # combinations
    ("pp=2:pipedream,zero=2", {}, "zero", "2", ["zero=1"]),
    ("offload=grads:nvme@0.5", {}, "offload", "grads:nvme@0.5", ["offload=grads:cpu@0.5"]),
    ("pp=2:2bw,offload=params:nvme", {}, "offload", "params:nvme", ["offload=optimizer:nvme"]),
    ("pp=2:2bw,mb=2,zero=3", {}, "zero", "3", ["zero=1"]),
    ("pp=2:pipedream", {"tied": True}, "pp", "2:pipedream", ["model.tied=false", "pp=2:1f1b"]),
    ("sync=server,zero=1", {}, "zero", "1", ["zero=0"]),
    ("dp=2,sync=server/3", {}, "sync", "server/3", ["sync=server/2"]),
    ("pp=2:2bw,mb=2,sync=server", {}, "sync", "server", ["sync=allreduce", "pp=2:1f1b"]),
    ("dp=2,tp=2,sync=server{reduce=max}", {}, "sync", "server{reduce=max}", ["sync=server{reduce=sum}"]),
    ("pp=2,sync=server{reduce=max}", {}, "sync", "server{reduce=max}", ["sync=server{reduce=sum}"]),
    ("cp=2,sync=server{reduce=sum}", {}, "sync", "server{reduce=sum}", ["sync=server"]),
    ("zero=0/2", {}, "zero", "0/2", ["zero=0"]),
    ("zero=0{reduce=int8}", {}, "zero", "0{reduce=int8}", ["zero=0"]),
    ("dp=2,zero=2{gather=int8;keep=step}", {}, "zero", "2{gather=int8;keep=step}", ["zero=2{gather=int8}"]),
    ("dp=6,zero=3/4{gather=int8}", {}, "zero", "3/4{gather=int8}", ["zero=3/3{gather=int8}", "zero=3/6{gather=int8}"]),
    ("sync=allreduce/2", {}, "sync", "allreduce/2", ["sync=allreduce"]),
    ("sync=allreduce{reduce=sum}", {}, "sync", "allreduce{reduce=sum}", ["sync=allreduce"]),
    ("recompute=none{stages=0}", {}, "recompute", "none{stages=0}", ["recompute=none"]),
    # ranks that do not multiply to the world
    ("dp=2,tp=2", {"world": 6}, "dp", "2", ["dp=3"]),
]


@pytest.mark.parametrize(("line", "unusual", "key", "value", "legal"), REFUSALS)
def test_every_refusal_names_the_setting_its_value_and_values_that_are_then_accepted(
    line: str, unusual: dict[str, int], key: str, value: str, legal: list[str]
) -> None:
    sizes = dict(unusual)
    batch, world = sizes.pop("batch", 0), sizes.pop("world", None)

    def check(line: str, world: int | None = None, **changes: bool) -> None:
        layout = Layout.parse(line)
        model = replace(Shape(**sizes), **changes)
        layout.check(model, batch or layout.dp * layout.mb, layout.ranks if world is None else world)

    with pytest.raises(LayoutError) as error:
        check(line, world)
    message = str(error.value)
    assert message.startswith(f"layout.{key} = {value}: ")
    assert named_values(message) == legal
    for pair in legal:
        if pair == "model.tied=false":
            check(line, tied=False)
        else:
            check(with_value(line, pair), world)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("tp=6:2d", "2-D needs a square, q·q ranks; use tp=4:2d or tp=9:2d"),
        (
            "tp=6:2.5d",
            "2.5-D needs q·q·d ranks, with the depth d at most q unless /D gives it; use tp=4:2.5d or tp=8:2.5d",
        ),
        ("tp=8:2.5d/3", "2.5-D of depth 3 needs q·q·3 ranks; use tp=3:2.5d/3 or tp=12:2.5d/3"),
        ("tp=9:3d", "3-D needs a cube, q·q·q ranks (AxBxC takes any three sides); use tp=8:3d or tp=27:3d"),
        ("tp=6:2x2x2", "2x2x2 has 8 ranks, not 6; use tp=8:2x2x2 or tp=6:3x1x2"),
        ("tp=8:4x2", "AxBxC needs three sides, from 1; use tp=8:4x2x1"),
        ("tp=4:0x2x2", "AxBxC needs three sides, from 1; use tp=4:2x2x1"),
        ("tp=4:1x2x2{form=loop}", "only 2-D and 2.5-D have a loop form; use tp=4:1x2x2"),
        ("dp=2,tp=8:2.5d,zero=1/3", "the group does not divide dp·cp·depth = 4; use zero=1/2 or zero=1/4"),
    ],
)
def test_grids_are_refused_in_words_that_a_person_expects(line: str, problem: str) -> None:
    assert refused(line).partition(": ")[2] == problem


@pytest.mark.parametrize(
    ("line", "over"),
    [("tp=3", "3 ranks"), ("tp=9:2d", "3 columns"), ("tp=18:2.5d", "3 columns"), ("tp=27:3d", "side c = 3")],
)
def test_what_does_not_divide_heads_is_named_as_the_grid_has_it(line: str, over: str) -> None:
    layout = Layout.parse(line)
    with pytest.raises(LayoutError, match=f"8 attention heads with 4 key/value heads do not divide over {over}; "):
        layout.check(Shape(), layout.ranks, layout.ranks)


def test_times_and_memory_are_those_of_list() -> None:
    problem = "only list is made for times and memory; use pp=2 or pp=2:list{times=1/1/1/0;memory=2}"
    assert refused("pp=2{memory=2;times=1/1/1/0}").partition(": ")[2] == problem
    for times in (
        (1e13, 1.0, 1.0, 0.0),
        (1.0, float("nan"), 1.0, 0.0),
        (1.0, float("inf"), 1.0, 0.0),
        (-1.0, 2.0, 1.0, 0.0),
    ):
        with pytest.raises(LayoutError, match="times needs four numbers F/I/W/C from 0 to below 1e12"):
            Layout(pp=2, schedule="list", list_times=times)
    with pytest.raises(LayoutError, match="memory starts at 1"):
        Layout(pp=2, schedule="list", list_memory=float("nan"))


def test_samples_positions_and_columns_need_not_divide() -> None:
    for line in ("tp=9:2d", "tp=18:2.5d/2", "tp=27:3d", "tp=30:5x2x3", "dp=2,tp=8:2.5d,zero=3/4", "tp=8:2x2x2,zero=3"):
        layout = Layout.parse(line)
        layout.check(Shape(heads=6, kv_heads=6, ffn=61, vocab=257), batch=layout.dp, world=layout.ranks)


def test_a_world_or_a_batch_is_named_where_that_would_do_as_well() -> None:
    with pytest.raises(LayoutError, match=r"use dp=3 or 4 ranks$"):
        Layout.parse("dp=2,tp=2").fill(6)
    with pytest.raises(LayoutError, match=r"or a global batch of 15$"):
        Layout.parse("dp=5").check(Shape(), batch=12, world=5)


@pytest.mark.parametrize("name", kinds.SCHEDULES)
def test_the_nearest_micro_batches_are_named_for_every_schedule(name: str) -> None:
    def admits(pp: int, mb: int) -> bool:
        return {"interleaved": mb % pp == 0, "dualpipe-v": mb >= 2 * pp, "2bw": mb >= pp - 1}.get(name, True)

    for pp, mb in product(range(1, 6), range(1, 21)):
        line = f"pp={pp}:{name},mb={mb}"
        if admits(pp, mb):
            assert Layout.parse(line).mb == mb
        else:
            below = [m for m in range(1, mb) if admits(pp, m)][-1:]
            above = next(m for m in range(mb, 50) if admits(pp, m))
            assert named_values(refused(line)) == [f"mb={m}" for m in [*below, above]]


@pytest.mark.parametrize("kind", ["2d", "2.5d", "3d"])
def test_grids_exist_exactly_for_the_sizes_that_have_the_shape(kind: str) -> None:
    shapes = {
        "2d": {q * q for q in range(1, 10)},
        "2.5d": {q * q * d for q in range(1, 9) for d in range(1, q + 1)},
        "3d": {q**3 for q in range(1, 6)},
    }[kind]
    for size in range(1, 65):
        line = f"tp={size}:{kind}"
        if size in shapes:
            grid = Layout.parse(line).tp_grid
            assert prod(grid) == size
            assert grid[0] == grid[1] >= grid[-1]
        else:
            below, above = (Layout.parse(pair).tp for pair in named_values(refused(line)))
            assert (below, above) == (max(n for n in shapes if n < size), min(n for n in shapes if n > size))
