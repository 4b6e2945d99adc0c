"""Context parallelism as an interpreter of roles, around that of tensor parallelism.

Weights lie as tensor parallelism has them, on every rank of the axis ``cp``. Each rank works on some positions of the
same samples, so gradients add up as those of replicas do. Only attention has to do with other positions: its core is
another module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shoal.context.plan import plan_of
from shoal.context.two_level import DividedAttention
from shoal.context.zigzag import Division
from shoal.local import Interpreter
from shoal.mesh import Coords, Mesh
from shoal.model.context import Context
from shoal.model.roles import Role
from shoal.placement import Rule

AXIS = "cp"


class OverPositions:
    """The interpreter of a ``division`` of positions over the mesh axis ``cp``; what each rank then has is divided
    further by the ``inner`` one. ``gather`` says whether keys and values are gathered or go round."""

    def __init__(self, inner: Interpreter, division: Division, *, gather: bool = False) -> None:
        self.inner, self.division, self.gather = inner, division, gather

    @property
    def loss_axes(self) -> tuple[str, ...]:
        return self.inner.loss_axes

    def place(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        return self.inner.place(role, module, parameter, shape)

    def adapt(self, role: Role, module: nn.Module, mesh: Mesh) -> nn.Module:
        module = self.inner.adapt(role, module, mesh)
        if role.kind != "attention":
            return module
        line, at, inside = mesh.ranks_over(AXIS), mesh.coords[AXIS], self.division.ulysses
        groups = line[at // inside * inside :][:inside], line[at % inside :: inside]
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
        at = coords[AXIS] // self.division.ulysses
        return replace(local, blocks=plan_of(self.division, ctx.length, at, ctx.window, local.documents))
