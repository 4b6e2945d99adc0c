"""What one rank has of a model: each parameter and buffer, with its placement and the other ranks that have it too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shoal.mesh import Coords, Grid
from shoal.model import init
from shoal.model.roles import REPLICATED, Role, RoleTable, role_of
from shoal.placement import Fragment, Holders, Placement, Rule, holders, whole

Place = Callable[[Role, str, str, Sequence[int]], Rule]
"""An interpreter's answer to where a parameter lies: (role, module, the parameter's local name, full shape) → rule."""


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank: the unit (layer) it belongs to, where it lies, who else has each of its pieces, and
    the role of its module."""

    name: str
    parameter: nn.Parameter
    unit: int
    placement: Placement
    holders: tuple[Holders, ...]
    role: Role = REPLICATED

    @property
    def decays(self) -> bool:
        """Weight decay acts on matrices and not on vectors: norms and biases are not to shrink."""
        return self.parameter.ndim > 1

    def fragments(self, kind: str, local: Tensor) -> list[Fragment]:
        """The pieces of ``local``, a tensor that lies as the parameter does."""
        return [
            Fragment(kind, piece, who.copies, piece.of(local))
            for piece, who in zip(self.placement.pieces, self.holders, strict=True)
        ]


def lay_out(
    module: nn.Module,
    layers: Sequence[tuple[str, nn.Module]],
    roles: RoleTable,
    place: Place,
    grid: Grid,
    coords: Coords,
) -> list[LocalParameter]:
    """Every parameter of ``module``, of its full shape, that ``place`` puts at ``coords``; once, however many modules
    share it. One that several layers share belongs to the first of them: its gradient is complete only when the
    backward pass has reached that one."""
    unit_of: dict[nn.Parameter, int] = {}
    for unit, (_, layer) in enumerate(layers):
        for parameter in layer.parameters():
            unit_of.setdefault(parameter, unit)
    found = []
    for name, parameter in module.named_parameters():
        owner, _, local = name.rpartition(".")
        role = role_of(roles, owner)
        rule = place(role, owner, local, parameter.shape)
        if (placement := rule.at(coords)) is not None:
            who = holders(rule, grid, coords)
            found.append(LocalParameter(name, parameter, unit_of[parameter], placement, who, role))
    return found


def materialise(
    module: nn.Module, parameters: Sequence[LocalParameter], seed: int, device: torch.device
) -> list[LocalParameter]:
    """Give each of ``parameters`` that is on the meta device memory for what this rank has of it, with its initial
    values, and put it into ``module`` wherever the parameter was. Returns the parameters as they then are."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for one in parameters:
        if one.parameter.is_meta:
            values = torch.empty(one.placement.shape, dtype=one.parameter.dtype)
            init.fill(values, one.placement, seed, one.role.std)
            made[one.parameter] = nn.Parameter(values.to(device), one.parameter.requires_grad)
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter in made:
                setattr(owner, name, made[parameter])
    return [replace(one, parameter=made.get(one.parameter, one.parameter)) for one in parameters]


def buffer_fragments(module: nn.Module, copies: Iterable[int]) -> list[Fragment]:
    """The persistent buffers of ``module``, each held whole by the ranks ``copies``."""
    everyone = tuple(copies)
    return [
        Fragment("weight", whole(name, buffer.shape).pieces[0], everyone, buffer)
        for name, buffer in persistent_buffers(module)
    ]


def persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of ``module`` that belong in a checkpoint."""
    kept = module.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]
