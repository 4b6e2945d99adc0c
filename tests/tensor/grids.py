"""Grids by their line of a layout, and what a rank has of the stream between a decoder's layers."""

from __future__ import annotations

from collections.abc import Sequence

from tensor_ranks import axes_of
from torch import Tensor

from shoal.build import interpreter_of
from shoal.comm.world import World
from shoal.config import Model
from shoal.context.interpreter import OverPositions
from shoal.layout import Layout
from shoal.mesh import Coords, Grid, Mesh
from shoal.model.decoder import decoder_roles
from shoal.tensor.grid import OnGrid

SHAPE = Model(layers=1, hidden=48, heads=48, kv_heads=24, head_dim=2, ffn=144, vocab=96)
"""Sizes that the grids of the tests divide; grouped heads, that are together wider than the stream."""


def interpreter(line: str) -> OnGrid:
    made = interpreter_of(Layout.parse(line), decoder_roles(SHAPE))
    if isinstance(made, OverPositions):
        made = made.inner
    assert isinstance(made, OnGrid)
    return made


def grid_of(line: str) -> Grid:
    return Grid(axes_of(interpreter(line)))


def mesh_of(line: str, world: World) -> Mesh:
    return Mesh(axes_of(interpreter(line)), world)


def cut(x: Tensor, on: OnGrid, coords: Coords, *axes: Sequence[str | None]) -> Tensor:
    """The block of ``x`` at ``coords``, where for each dim of it ``axes`` are those that divide it, the outer first."""
    for dim, names in enumerate(axes):
        for name in names:
            if name is not None:
                x = x.chunk(on.sizes[name], dim)[coords[name]]
    return x.contiguous()


def stream_block(x: Tensor, on: OnGrid, coords: Coords) -> Tensor:
    """What the rank at ``coords`` has of the stream ``x`` [samples, positions, hidden], all of whose sizes divide."""
    return cut(x, on, coords, on.axes.samples, (on.axes.positions,), (on.axes.hidden,))


def middle_block(x: Tensor, on: OnGrid, coords: Coords) -> Tensor:
    """The same between two linears, of ``x`` [samples, positions, columns]."""
    return cut(x, on, coords, on.axes.attended, (), (on.axes.columns,))
