from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, replace
from itertools import product
from math import prod
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import LayoutError
from shoal.layout import Layout, Offload, kinds
from shoal.layout import layout as layout_module


@dataclass(frozen=True)
class Shape:
    """Sizes that most small layouts divide; ffn and vocabulary are primes, which nothing divides."""

    layers: int = 8
    hidden: int = 48
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 61
    vocab: int = 257
    experts: int = 0
    tied: bool = False


def test_a_layout_is_a_value() -> None:
    assert len({Layout.parse("tp=4:2d"), Layout.parse("tp=4:2d"), Layout.parse("tp=4")}) == 2
    with pytest.raises(FrozenInstanceError):
        Layout().dp = 2  # type: ignore[misc]


def test_fields_left_open_are_derived_the_same_way_as_from_a_line() -> None:
    assert Layout(tp=4, tp_kind="2d") == Layout.parse("tp=4:2d")
    assert Layout(tp=8, tp_kind="2.5d", tp_grid=(2, 2, 2)) == Layout.parse("tp=8:2.5d")
    assert Layout(pp=2, schedule="interleaved", mb=2) == Layout.parse("pp=2:interleaved,mb=2")
    assert Layout(sync="server") == Layout.parse("sync=server/1")


# ---- every layout there is ---------------------------------------------------------------------------------

TENSOR_GRIDS = [
    *[("1d", (n,)) for n in (1, 2, 3, 4, 6, 8)],
    *[("1d-sp", (n,)) for n in (2, 3, 4)],
    *[("2d", (q, q)) for q in (1, 2, 3)],
    *[("2.5d", (q, q, d)) for q, d in product((1, 2, 3), (1, 2, 3))],
    *[("3d", (q, q, q)) for q in (2, 3)],
    *[("AxBxC", sides) for sides in product((1, 2, 3), repeat=3)],
]
CONTEXT_GRIDS = [
    *[(kind, (1, n)) for kind in ("ring", "gather") for n in (1, 2, 3)],
    *[("ulysses", (n, 1)) for n in (1, 2, 4)],
    *[("UxR", sides) for sides in product((1, 2, 3), (1, 2))],
]


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any legal layout: every kind of every key, with every option."""
    tp_kind, tp_grid = draw(st.sampled_from(TENSOR_GRIDS))
    cp_kind, cp_grid = draw(st.sampled_from(CONTEXT_GRIDS))
    tp, cp = prod(tp_grid), prod(cp_grid)
    dp, pp = draw(st.sampled_from([-1, 1, 2, 3, 4])), draw(st.integers(1, 4))
    name = draw(st.sampled_from(list(kinds.SCHEDULES)))
    schedule = kinds.SCHEDULES[name]
    chunks = draw(st.integers(1, 3)) if schedule.any_chunks else schedule.chunks
    numbers = st.lists(st.integers(1, 5), min_size=pp * chunks, max_size=pp * chunks)
    some, any_ = st.floats(1e-9, 1e9), st.floats(0, 1e9)
    times = st.tuples(some, any_, any_, any_) if schedule.made_to_measure else st.none()
    memory = st.floats(1, 1e6) if schedule.made_to_measure else st.none()
    recompute = draw(st.sampled_from(kinds.RECOMPUTES))
    stages = st.sets(st.integers(0, pp * chunks - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    sync = "allreduce" if schedule.asynchronous else draw(st.sampled_from(kinds.SYNCS))
    reduces = [one for one in kinds.REDUCES if one == "mean" or cp * (tp * pp if one == "max" else 1) == 1]
    zero = 0 if sync == "server" else draw(st.integers(0, 1 if schedule.asynchronous else 3))
    etp = draw(divisors(abs(dp) * cp * tp))
    apart = (
        {"params", "grads"} if schedule.asynchronous else set(kinds.OFFLOAD_WHATS[:3]) if sync == "server" else set()
    )
    parts = st.builds(
        Offload,
        st.sampled_from([what for what in kinds.OFFLOAD_WHATS if what not in apart]),
        st.sampled_from(kinds.OFFLOAD_WHERES),
        st.one_of(st.just(1.0), st.floats(0, 1, exclude_min=True)),
    ).filter(lambda part: (part.what, part.where) != ("grads", "nvme"))
    return Layout(
        dp=dp,
        tp=tp,
        tp_kind=tp_kind,
        tp_grid=tp_grid,
        tp_form=draw(st.sampled_from(kinds.TENSOR_FORMS)) if tp_kind in kinds.SUMMA_KINDS else "gather",
        pp=pp,
        schedule=name,
        chunks=chunks,
        stage_layers=draw(st.none() | numbers.map(tuple)),
        list_times=draw(st.none() | times),
        list_memory=draw(st.none() | memory),
        cp=cp,
        cp_kind=cp_kind,
        cp_grid=cp_grid,
        ep=draw(divisors(abs(dp) * cp * tp // etp)),
        etp=etp,
        zero=zero,
        zero_group=draw(st.none() | divisors(abs(dp) * cp)) if zero else None,
        int8_gather=draw(st.booleans()) if zero else False,
        int8_reduce=draw(st.booleans()) if zero else False,
        keep_params=draw(st.booleans()) if zero == 3 else False,
        sync=sync,
        servers=draw(st.none() | st.integers(1, abs(dp))) if sync == "server" else None,
        stale=draw(st.integers(0, 2)) if sync == "server" else 0,
        reduce=draw(st.sampled_from(reduces)) if sync == "server" else "mean",
        mb=schedule.nearest_mb(pp, draw(st.integers(1, 16)))[0],
        recompute=recompute,
        recompute_stages=draw(st.none() | stages) if recompute != "none" else None,
        offload=tuple(draw(st.lists(parts, max_size=4, unique_by=lambda part: part.what))),
        dtype=draw(st.sampled_from(kinds.DTYPES)),
        auto=draw(st.booleans()),
    )


@settings(max_examples=150, derandomize=True, deadline=None)
@given(layouts(), st.randoms(use_true_random=False))
def test_every_layout_round_trips_through_its_line_whatever_the_order_of_keys(layout: Layout, random: Random) -> None:
    line = str(layout)
    assert Layout.parse(line) == layout
    assert str(Layout.parse(line)) == line
    items = line.split(",")
    random.shuffle(items)
    assert Layout.parse(" , ".join(items)) == layout


@settings(max_examples=150, derandomize=True, deadline=None)
@given(layouts())
def test_a_layout_that_divides_heads_hidden_size_experts_batch_and_layers_is_never_refused(
    layout: Layout,
) -> None:
    layout = replace(layout, dp=abs(layout.dp))
    if layout.sync == "server" and (layout.cp * layout.tp) % (layout.ep * layout.etp):
        layout = replace(layout, sync="allreduce", servers=None, stale=0, reduce="mean")  # servers have all experts
    model = Shape(
        layers=sum(layout.stage_layers or (1,) * layout.stages),
        hidden=2**5 * 3**3,
        heads=2**5 * 3**3,
        kv_heads=2**5 * 3**3,
        experts=0 if layout.ep == layout.etp == 1 else layout.ep,
    )
    layout.check(model, batch=layout.dp * layout.mb, world=layout.ranks)


# ---- the world ---------------------------------------------------------------------------------------------


def test_axes_run_from_pipeline_outside_to_tensor_inside() -> None:
    layout = Layout.parse("dp=3,cp=2,tp=4,pp=5")
    assert layout.axes == (("pp", 5), ("dp", 3), ("cp", 2), ("tp", 4))
    assert layout.ranks == 120


@pytest.mark.parametrize(
    ("line", "axes", "alike"),
    [
        ("dp=2,tp=4", {"tp": 4}, 2),
        ("tp=2:1d-sp", {"tp": 2}, 1),
        ("dp=2,tp=9:2d", {"row": 3, "col": 3}, 2),
        ("dp=2,tp=8:2.5d", {"depth": 2, "row": 2, "col": 2}, 4),
        ("tp=12:2.5d/3", {"depth": 3, "row": 2, "col": 2}, 3),
        ("dp=3,tp=8:3d", {"a": 2, "b": 2, "c": 2}, 3),
        ("tp=24:4x3x2", {"a": 4, "b": 3, "c": 2}, 1),
    ],
)
def test_each_side_of_a_grid_is_a_mesh_axis_the_last_one_fastest(line: str, axes: dict[str, int], alike: int) -> None:
    layout = Layout.parse(line)
    assert layout.tensor_axes == tuple(axes.items())
    assert layout.tensor_names == tuple(axes)
    assert layout.axes == (("pp", 1), ("dp", layout.dp), ("cp", 1), *axes.items())
    assert layout.alike == alike


def test_fill_gives_dp_the_ranks_that_are_left() -> None:
    layout = Layout.parse("dp=-1,tp=2,pp=2,zero=1")
    assert layout.fill(12) == Layout.parse("dp=3,tp=2,pp=2,zero=1")
    assert Layout.parse("dp=4").fill(4) == Layout.parse("dp=4")


def test_fill_names_the_worlds_that_would_do() -> None:
    with pytest.raises(LayoutError, match=r"layout\.dp = -1: .* cp·tp·pp = 4; use 8 or 12 ranks"):
        Layout.parse("dp=-1,tp=2,pp=2").fill(10)
    with pytest.raises(LayoutError, match=r"use 4 ranks"):
        Layout.parse("dp=-1,tp=2,pp=2").fill(2)
    with pytest.raises(LayoutError, match=r"layout\.dp = 2: dp·cp·tp·pp = 4 ranks, .* has 3; use 4 ranks"):
        Layout.parse("dp=2,tp=2").fill(3)


def test_fill_checks_what_depends_on_the_replicas() -> None:
    with pytest.raises(LayoutError, match=r"layout\.zero = 3/4: .* dp·cp = 6; use zero=3/3 or zero=3/6"):
        Layout.parse("dp=-1,zero=3/4").fill(6)
    with pytest.raises(LayoutError, match=r"layout\.ep = 4"):
        Layout.parse("dp=-1,ep=4").fill(6)


def test_ranks_are_unknown_until_dp_is_filled() -> None:
    with pytest.raises(LayoutError, match=r"layout\.dp = -1"):
        _ = Layout.parse("dp=-1").ranks


# ---- what is built -----------------------------------------------------------------------------------------

UNBUILT = {
    "zero=1": "ZeRO stage 1",
    "zero=2": "ZeRO stage 2",
    "zero=3": "ZeRO stage 3",
    "sync=server": "synchronisation server",
    "tp=2": "tensor parallelism 1d",
    "tp=2:1d-sp": "tensor parallelism 1d-sp",
    "tp=4:2d": "tensor parallelism 2d",
    "tp=8:2.5d": "tensor parallelism 2.5d",
    "tp=8:3d": "tensor parallelism 3d",
    "tp=4:1x2x2": "tensor parallelism AxBxC",
    **{f"pp=2:{name},mb=4": f"pipeline schedule {name}" for name in kinds.SCHEDULES},
    "cp=2": "context parallelism ring",
    "cp=2:ulysses": "context parallelism ulysses",
    "cp=2:gather": "context parallelism gather",
    "cp=2:2x1": "context parallelism UxR",
    "dp=2,ep=2": "expert parallelism",
    "dp=2,etp=2": "expert tensor parallelism",
    "recompute=selective": "recomputation selective",
    "recompute=full": "recomputation full",
    **{
        f"offload={what}:{where}": f"offload {what}:{where}"
        for what, where in product(kinds.OFFLOAD_WHATS, kinds.OFFLOAD_WHERES)
        if (what, where) != ("grads", "nvme")
    },
    "dtype=bf16": "precision bf16",
    "dtype=fp16": "precision fp16",
    "auto": "the planner's choice of layout",
}


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """A table of what is built that does not change as more is built."""
    built = {"dtype": ("float32", "float64")}
    monkeypatch.setattr(layout_module, "BUILT", built)
    return built


@pytest.mark.parametrize("line", UNBUILT)
def test_a_kind_that_is_not_built_is_refused_by_name(line: str, today: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(LayoutError) as error:
        Layout.parse(line).check_built()
    assert f": {UNBUILT[line]} is not built yet; built: dp, mb, dtype=float32|float64" in str(error.value)


def test_the_refusal_of_an_unbuilt_kind_names_the_setting_and_its_value(today: object) -> None:
    with pytest.raises(LayoutError) as error:
        Layout.parse("dp=2,tp=4:2d").check_built()
    assert str(error.value) == (
        "layout.tp = 4:2d: tensor parallelism 2d is not built yet; built: dp, mb, dtype=float32|float64"
    )


@pytest.mark.parametrize(
    "line",
    [
        "dp=1",
        "dp=-1",
        "dp=4,mb=2",
        "dp=2,dtype=float64",
        "tp=1,pp=1,cp=1,ep=1",
        "dp=2,zero=1",
        "dp=2,zero=2,mb=4",
        "dp=4,zero=3/2",
        "dp=4,zero=3/2{gather=int8;reduce=int8;keep=step}",
        "tp=2",
        "tp=4:1d-sp",
        "tp=4:2d",
        "dp=2,tp=8:2.5d/2{form=loop},zero=3/4",
        "tp=8:3d,pp=2,mb=2",
        "tp=6:1x2x3,recompute=full",
        "pp=2:gpipe,mb=4",
        "pp=4{layers=1/2/2/1},mb=2",
        "cp=2",
        "cp=4:ulysses,tp=2",
        "cp=2:gather",
        "cp=4:2x2,zero=3",
        "recompute=selective",
        "dp=2,zero=3,offload=optimizer:nvme@0.5+params:cpu+grads:cpu",
        "pp=2,recompute=full{stages=0}",
        "dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4,recompute=full,dtype=float64",
    ],
)
def test_what_is_built_is_not_refused(line: str) -> None:
    Layout.parse(line).check_built()


def test_one_entry_in_the_table_builds_one_kind(today: dict[str, tuple[str, ...]]) -> None:
    today |= {"zero": ("1",), "tp": ("1d", "1d-sp"), "ep": ("",)}
    for line in ("dp=2,zero=1", "tp=2", "tp=2:1d-sp,zero=1", "dp=2,ep=2"):
        Layout.parse(line).check_built()
    with pytest.raises(LayoutError, match=r"built: dp, mb, .*, zero=1, tp=N:1d\|1d-sp, ep=N$"):
        Layout.parse("dp=2,zero=2").check_built()
    with pytest.raises(LayoutError, match=r"tensor parallelism 2d is not built yet"):
        Layout.parse("tp=4:2d").check_built()


def test_the_table_of_what_is_built_names_only_kinds_of_the_grammar() -> None:
    offloads = tuple(f"{what}:{where}" for what, where in product(kinds.OFFLOAD_WHATS, kinds.OFFLOAD_WHERES))
    known = {
        "tp": kinds.TENSOR_KINDS,
        "pp": tuple(kinds.SCHEDULES),
        "cp": kinds.CONTEXT_KINDS,
        "ep": ("",),
        "etp": ("",),
        "zero": ("1", "2", "3"),
        "sync": kinds.SYNCS,
        "recompute": kinds.RECOMPUTES,
        "offload": offloads,
        "dtype": kinds.DTYPES,
        "auto": ("",),
    }
    for key, those in layout_module.BUILT.items():
        assert set(those) <= set(known[key])


def test_a_table_reads_back_as_the_layout() -> None:
    measured = "pp=4:list{layers=4/3/3/2;times=10/12/9/1;memory=3}"
    for text in ("dp=1", "dp=2,tp=4:2d{form=loop},zero=1,mb=3,dtype=bf16", measured, "auto"):
        assert Layout.from_table(Layout.parse(text).table()) == Layout.parse(text)
