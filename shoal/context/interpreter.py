"""Context parallelism as an interpreter of roles, around that of tensor parallelism.

Weights lie as tensor parallelism has them, on every rank of the axis ``cp``. Each rank works on some positions of the
same samples, so gradients add up as those of replicas do. Only attention has to do with other positions: its core is
another module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import nn

from shoal.context.plan import plan_of
from shoal.context.two_level import DividedAttention
from shoal.context.zigzag import Division
from shoal.local import Interpreter
from shoal.mesh import Coords, Mesh
from shoal.model.context import Batch, Context
from shoal.model.roles import Role
from shoal.placement import Rule

AXIS = "cp"


class OverPositions:
    """The interpreter of a ``division`` of positions over the mesh axis ``cp``; what each rank then has is divided
    further by the ``inner`` one. ``gather`` says whether keys and values are gathered or go round. ``rows`` are the
    mesh axes, with their sizes, on which ranks of the inner one have different samples: positions, where a micro-batch
    has fewer samples."""

    def __init__(
        self, inner: Interpreter, division: Division, *, gather: bool = False, rows: Mapping[str, int] | None = None
    ) -> None:
        self.inner, self.division, self.gather = inner, division, gather
        self.rows = dict(rows or {})

    def part(self, batch: Batch, coords: Coords) -> Batch:
        """What of a micro-batch is for the ranks that differ from the one at ``coords`` in tensor parallelism alone."""
        rows = prod(self.rows.values())
        if len(batch["tokens"]) < rows:
            return self.division.folded(batch, coords[AXIS], rows)
        return batch if self.division == Division() else self.division.part(batch, coords[AXIS])

    @property
    def loss_axes(self) -> tuple[str, ...]:
        return self.inner.loss_axes

    def place(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        return self.inner.place(role, module, parameter, shape)

    def adapt(self, role: Role, module: nn.Module, mesh: Mesh) -> nn.Module:
        module = self.inner.adapt(role, module, mesh)
        if role.kind != "attention":
            return module

        def where(rank: int) -> tuple[int, int]:
            """The place of the ring, and the part of its chunks."""
            return divmod(mesh.grid.coords(rank)[AXIS], self.division.ulysses)

        place, part = where(mesh.world.rank)
        line, field = mesh.ranks_over(AXIS), mesh.ranks_over(AXIS, *self.rows)
        groups = (
            tuple(rank for rank in line if where(rank)[0] == place),
            *(tuple(rank for rank in ranks if where(rank)[1] == part) for ranks in (line, field)),
        )
        mesh.open_groups(set(groups))
        return DividedAttention(module, *(mesh.group(ranks) for ranks in groups), gather=self.gather)

    def see(self, ctx: Context) -> None:
        self.inner.see(ctx)

    def localise(self, ctx: Context, coords: Coords) -> Context:
        """What the inner interpreter says, and of attention what is this rank's part; nothing where every rank has
        all positions, as when a text is generated."""
        local: Context = self.inner.localise(ctx, coords)
        if ctx.places is None:
            return local
        at, division = coords[AXIS] // self.division.ulysses, self.division
        if ctx.places.ndim > 1:
            division = division.over_rows(prod(self.rows.values()))
            for axis, size in self.rows.items():
                at = at * size + coords[axis]
        return replace(local, blocks=plan_of(division, ctx.length, at, ctx.window, local.documents))
