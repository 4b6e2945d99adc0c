"""Expert parallelism as an interpreter of the role table, around that of tensor parallelism.

It answers for routers, experts and which tokens are whose; for all else it asks the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from shoal.expert.dispatch import DispatchedExperts
from shoal.expert.spread import Spread
from shoal.expert.tokens import DividedTokens, Stream
from shoal.local import Interpreter
from shoal.mesh import Coords, Mesh
from shoal.model.roles import Role
from shoal.model.routed import Experts
from shoal.placement import Rule, whole


class WithExperts:
    """``tensor`` with experts that are ``spread`` over ranks, whose tokens come from a ``stream``.

    Tokens are distinct where the router sees them, so it is whole on all ranks and none repeats another's work.
    """

    def __init__(self, tensor: Interpreter, spread: Spread, stream: Stream) -> None:
        self.tensor, self.spread, self.stream = tensor, spread, stream

    @property
    def loss_axes(self) -> tuple[str, ...]:
        return self.tensor.loss_axes

    def place(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        if role.kind == "router":
            placement = whole(f"{module}.{parameter}", shape)
            return Rule(lambda _: placement)
        if role.kind in ("expert", "expert_down"):
            return self.spread.place(role, module, parameter, shape)
        return self.tensor.place(role, module, parameter, shape)

    def adapt(self, role: Role, module: nn.Module, mesh: Mesh) -> nn.Module:
        if role.kind == "tokens":
            sizes = dict(mesh.grid.axes)
            divided = any(sizes[axis] > 1 for axis in (*self.stream.shared, *self.stream.samples))
            return DividedTokens(self.stream, mesh) if divided else module
        if role.kind == "experts" and self.spread.ranks > 1:
            group = mesh.group(self.spread.neighbours(mesh))
            return DispatchedExperts(cast(Experts, module), group, self.spread.etp)
        return self.tensor.adapt(role, module, mesh)

    def localise(self, ctx: Any, coords: Coords) -> Any:
        return self.tensor.localise(ctx, coords)

    def see(self, ctx: Any) -> None:
        self.tensor.see(ctx)
