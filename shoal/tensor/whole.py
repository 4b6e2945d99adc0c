"""No tensor parallelism: the interpreter of the role table under which a rank holds the whole of each parameter.

It still names the pieces of fused matrices, since checkpoints and initial weights know the logical ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from shoal.mesh import Coords, Mesh
from shoal.model.roles import Role, logical_parts
from shoal.placement import Rule, stacked, whole


class Whole:
    """Everything everywhere, entire."""

    loss_axes: tuple[str, ...] = ()

    def place(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        if role.parts:
            placement = stacked(logical_parts(role, module, parameter), shape)
        else:
            placement = whole(f"{module}.{parameter}" if module else parameter, shape)
        return Rule(lambda _: placement)

    def adapt(self, role: Role, module: nn.Module, mesh: Mesh) -> nn.Module:
        return module

    def localise(self, ctx: Any, coords: Coords) -> Any:
        return ctx

    def see(self, ctx: Any) -> None:
        pass
