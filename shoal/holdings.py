"""What one rank holds of a model: each parameter and buffer, with its placement and the other ranks that hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.mesh import Coords, Grid
from shoal.model import init
from shoal.model.roles import Role, RoleTable, role_of
from shoal.placement import Holders, Holding, Placement, Rule, holders, whole

Place = Callable[[Role, str, str, Sequence[int]], Rule]
"""An interpreter's answer to where a parameter lies: (role, module, the parameter's local name, full shape) → rule."""


@dataclass(frozen=True)
class Held:
    """A parameter of this rank: the unit (layer) it belongs to, where it lies, who else holds each of its pieces."""

    name: str
    parameter: nn.Parameter
    unit: int
    placement: Placement
    holders: tuple[Holders, ...]

    @property
    def decays(self) -> bool:
        """Weight decay acts on matrices and not on vectors: norms and biases are not to shrink."""
        return len(self.placement.pieces[0].shape) > 1

    def holdings(self, kind: str, local: Tensor) -> list[Holding]:
        """The pieces of ``local``, a tensor that lies as the parameter does."""
        return [
            Holding(kind, piece, who.copy, piece.of(local))
            for piece, who in zip(self.placement.pieces, self.holders, strict=True)
        ]


def hold(
    module: nn.Module,
    layers: Sequence[tuple[str, nn.Module]],
    roles: RoleTable,
    place: Place,
    grid: Grid,
    coords: Coords,
) -> list[Held]:
    """Every parameter of ``module`` once, placed by ``place``. A parameter that several layers share belongs to the
    first of them, since its gradient is complete only when the backward pass has reached that one."""
    unit_of: dict[nn.Parameter, int] = {}
    for unit, (_, layer) in enumerate(layers):
        for parameter in layer.parameters():
            unit_of.setdefault(parameter, unit)
    found = []
    for name, parameter in module.named_parameters():
        owner, _, local = name.rpartition(".")
        rule = place(role_of(roles, owner), owner, local, parameter.shape)
        placement = rule.at(coords)
        assert placement is not None, f"{name} is held by no rule at {dict(coords)}"
        found.append(Held(name, parameter, unit_of[parameter], placement, holders(rule, grid, coords)))
    return found


def materialise(
    module: nn.Module, roles: RoleTable, place: Place, coords: Coords, seed: int, device: torch.device
) -> None:
    """Give every parameter that is on the meta device memory for what this rank holds, with its initial values.

    A parameter that several modules share stays one.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner_name, owner in module.named_modules():
        for local, parameter in owner.named_parameters(recurse=False):
            if parameter.is_meta and parameter not in made:
                role = role_of(roles, owner_name)
                placement = place(role, owner_name, local, parameter.shape).at(coords)
                assert placement is not None
                values = torch.empty(placement.shape, dtype=parameter.dtype)
                init.fill(values, placement, seed, role.std)
                made[parameter] = nn.Parameter(values.to(device), parameter.requires_grad)
            if parameter in made:
                setattr(owner, local, made[parameter])


def buffer_holdings(module: nn.Module, copies: Iterable[int]) -> list[Holding]:
    """The persistent buffers of ``module``, each held whole by the ranks ``copies``."""
    everyone = tuple(copies)
    return [
        Holding("weight", whole(name, buffer.shape).pieces[0], everyone, buffer)
        for name, buffer in persistent_buffers(module)
    ]


def persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of ``module`` that belong in a checkpoint."""
    kept = module.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]
