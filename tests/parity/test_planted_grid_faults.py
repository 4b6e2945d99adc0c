"""verify must catch and name the faults that tensor parallelism on a grid is prone to: each is planted here on purpose.

As in :mod:`test_planted_faults`, a fault is of the layout's side only: the one process beside it has no grid.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from test_planted_faults import Fault, Patch, compare, not_summed
from torch import Tensor

from shoal.comm.differentiable import Arriving
from shoal.comm.world import Group
from shoal.layout import Layout
from shoal.mesh import Coords, Mesh
from shoal.model.dropout import Noise
from shoal.tensor import summa as summa_module
from shoal.tensor.grid import OnGrid
from shoal.tensor.samples import Samples
from shoal.tensor.summa import _start_block
from shoal.train.pool import Pool


def forgotten_over(axis: str) -> Patch:
    """The gradients of what is held alike on ``axis`` (several are joined by "·") are not summed there."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        not_summed(patch, lambda other: other == axis)

    plant.__name__ = f"gradients not summed over {axis}"
    return plant


def loss_of_one_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OnGrid, "loss_axes", ())


def samples_by_the_wrong_coordinate(patch: pytest.MonkeyPatch) -> None:
    of_right_coordinates = Samples.over

    def over(axes: Sequence[tuple[str, int]], coords: Coords, multiple: int = 1) -> Samples:
        return of_right_coordinates(axes, {**coords, "row": coords["col"]}, multiple)

    patch.setattr(Samples, "over", over)


def samples_alike_at_every_depth(patch: pytest.MonkeyPatch) -> None:
    of_all_axes = Samples.over

    def over(axes: Sequence[tuple[str, int]], coords: Coords, multiple: int = 1) -> Samples:
        return of_all_axes([one for one in axes if one[0] != "depth"], coords, multiple)

    patch.setattr(Samples, "over", over)


def dropout_by_local_feature(patch: pytest.MonkeyPatch) -> None:
    drop = Noise.drop

    def local(self: Noise, x: Tensor, rate: float, site: str) -> Tensor:
        return drop(replace(self, block=0), x, rate, site)

    patch.setattr(Noise, "drop", local)


def dropout_by_local_sample(patch: pytest.MonkeyPatch) -> None:
    """On every rank that of the first samples."""
    localise = OnGrid.localise

    def first(self: OnGrid, ctx: Any, coords: Coords) -> Any:
        return replace(
            localise(self, ctx, coords), noise=localise(self, ctx, {**coords, "row": 0, "depth": 0, "a": 0}).noise
        )

    patch.setattr(OnGrid, "localise", first)


def rows_and_columns_transposed(patch: pytest.MonkeyPatch) -> None:
    over, other = Mesh.over, {"row": "col", "col": "row"}

    def transposed(self: Mesh, *axes: str, **channel: str) -> Group:
        return over(self, *(other.get(axis, axis) for axis in axes), **channel)

    patch.setattr(Mesh, "over", transposed)


def a_block_again(patch: pytest.MonkeyPatch) -> None:
    """In the loop of a product each step but the first has the block of the step before."""

    def late(own: Tensor, t: int, widths: Sequence[int], group: Group) -> Arriving:
        return _start_block(own, max(0, t - 1), widths, group)

    patch.setattr(summa_module, "_start_block", late)


EVEN = ("model.ffn=52", "model.vocab=260")
"""Blocks of one size, so that a block in the wrong place still fits there."""
ONE_HEAD = ("model.heads=4", "model.kv_heads=1")
MATRICES = r"table|head\.out|attn\.|ffn\."

FAULTS = [
    Fault(forgotten_over("depth"), "tp=8:2.5d", "gradient blocks.0.attn.q.weight is not the same", guilty=MATRICES),
    Fault(forgotten_over("depth·row"), "tp=8:2.5d", "gradient blocks.0.attn_norm.weight is not", guilty="norm"),
    Fault(forgotten_over("row"), "tp=4:2d", "gradient blocks.1.ffn_norm.weight is not the same", guilty="norm"),
    Fault(forgotten_over("a·c"), "tp=8:3d", "gradient head.norm.weight is not the same on rank 1", guilty="norm"),
    Fault(
        forgotten_over("col"),
        "tp=4:2d",
        "gradient blocks.0.attn.k.weight is not the same on rank 1",
        guilty=r"attn\.[kv]",
        settings=ONE_HEAD,
    ),
    Fault(
        forgotten_over("c"),
        "tp=8:3d",
        "gradient blocks.2.attn.v.weight is not the same on rank 1",
        guilty=r"attn\.[kv]",
        settings=ONE_HEAD,
    ),
    *(Fault(loss_of_one_row, layout, "loss differs", guilty="none") for layout in ("tp=4:2d", "tp=8:3d")),
    Fault(samples_by_the_wrong_coordinate, "tp=4:2d", "loss differs"),
    Fault(samples_alike_at_every_depth, "tp=8:2.5d", "loss differs"),
    *(
        Fault(dropout_by_local_feature, layout, "gradient embed.table.weight differs")
        for layout in ("tp=4:2d", "tp=8:2.5d", "tp=8:3d")
    ),
    *(
        Fault(dropout_by_local_sample, layout, "gradient embed.table.weight differs")
        for layout in ("tp=4:2d", "tp=8:2.5d", "tp=8:3d")
    ),
    Fault(rows_and_columns_transposed, "tp=4:2d", "gradient blocks.0.attn.q.weight differs", settings=EVEN),
    Fault(a_block_again, "tp=4:2d{form=loop}", "gradient blocks.0.ffn.up.weight differs", settings=EVEN),
]

QUICK = ("gradients not summed over row", "rows_and_columns_transposed")
"""Faults that are looked for in the quick suite too."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, id=str(one), marks=() if one.plant.__name__ in QUICK else pytest.mark.parity) for one in FAULTS],
)
def test_a_planted_fault_of_a_grid_is_caught_and_named(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    with Pool(Layout.parse(fault.layout).ranks) as with_it:
        report = compare(fault.layout, fault.settings, with_it, fault.steps)
    assert not report.agree
    assert any(said.startswith(fault.named) for said in report.faults), report.faults
    gradients = [said for said in report.faults if said.startswith("gradient ")]
    assert all(re.search(fault.guilty, said) for said in gradients), gradients


@pytest.mark.parity
@pytest.mark.parametrize(
    ("line", "settings"), sorted({(fault.layout, fault.settings) for fault in FAULTS}), ids=lambda value: str(value)
)
def test_without_a_fault_the_same_grid_agrees(line: str, settings: tuple[str, ...], eight: Pool) -> None:
    report = compare(line, settings, eight, steps=3)
    assert report.agree, report.faults
