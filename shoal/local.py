"""What one rank has of a model: each parameter and buffer, with its placement and the other ranks that have it too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.mesh import Coords, Grid, Mesh
from shoal.meter import mark
from shoal.model import init
from shoal.model.roles import REPLICATED, Role, RoleTable, role_of
from shoal.placement import Census, Fragment, Holders, Placement, Rule, whole
from shoal.purposes import PARAMETERS


class Interpreter(Protocol):
    """One way to divide the tensors of a model over ranks: an answer for each role."""

    def place(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        """Where the ``parameter`` (its local name) of ``module``, of full ``shape``, lies."""

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The mesh axes on which ranks have the losses of different samples of one micro-batch."""

    def adapt(self, role: Role, module: nn.Module, mesh: Mesh) -> nn.Module:
        """What takes the place of a module that holds this rank's part of its parameters; itself, often."""

    def localise(self, ctx: Any, coords: Coords) -> Any:
        """What of a micro-batch's context belongs to the rank at ``coords``."""

    def see(self, ctx: Any) -> None:
        """A layer is about to run under ``ctx``: for modules that must know of it more than their inputs tell."""


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank: the units (layers) here that use it, where it lies, who else has each of its pieces,
    and the role of its module.

    Its gradient is complete when all of ``units`` are done. ``drawn`` gives its initial values where the parameter has
    no memory of its own yet.
    """

    name: str
    parameter: nn.Parameter
    units: tuple[int, ...]
    placement: Placement
    holders: tuple[Holders, ...]
    role: Role = REPLICATED
    drawn: Callable[[torch.dtype], Tensor] | None = field(default=None, compare=False, repr=False)

    @property
    def unit(self) -> int:
        """The first of its units, whose backward pass is the last to reach it."""
        return self.units[0]

    def values(self, dtype: torch.dtype) -> Tensor:
        """The parameter's values in ``dtype``, drawn now if nobody has yet."""
        return self.parameter.detach().to(dtype) if self.drawn is None else self.drawn(dtype)

    def fragments(self, kind: str, local: Tensor) -> list[Fragment]:
        """The pieces of ``local``, a tensor that lies as the parameter does."""
        return [
            Fragment(kind, piece, who.copies, piece.of(local))
            for piece, who in zip(self.placement.pieces, self.holders, strict=True)
        ]


@dataclass(frozen=True)
class LogicalParameter:
    """A parameter of the whole model, the units (layers) that use it, and who holds which part of it."""

    name: str
    parameter: nn.Parameter
    units: tuple[int, ...]
    census: Census
    role: Role


def lay_out(
    module: nn.Module,
    layers: Sequence[tuple[str, nn.Module]],
    roles: RoleTable,
    interpreter: Interpreter,
    grid: Grid,
    coords: Coords,
    units_of: Sequence[Collection[int]] = (),
) -> list[LocalParameter]:
    """Every parameter of ``module``, of full shape, that is held at ``coords``; once, however many modules share it.

    ``units_of`` are the units of each pipeline rank (one that has them all, unless told). A parameter that several
    ranks' layers share is held by each.
    """
    return held_at(coords, logical_parameters(module, layers, roles, interpreter, grid, units_of), units_of)


def logical_parameters(
    module: nn.Module,
    layers: Sequence[tuple[str, nn.Module]],
    roles: RoleTable,
    interpreter: Interpreter,
    grid: Grid,
    units_of: Sequence[Collection[int]] = (),
) -> list[LogicalParameter]:
    """Every parameter of ``module``, once. Of them :func:`held_at` finds what a rank holds, for any number of ranks."""
    users: dict[nn.Parameter, list[int]] = {}
    for unit, (_, layer) in enumerate(layers):
        for parameter in layer.parameters():
            users.setdefault(parameter, []).append(unit)
    found = []
    for name, parameter in module.named_parameters():
        owner, _, local = name.rpartition(".")
        role = role_of(roles, owner)
        rule = interpreter.place(role, owner, local, parameter.shape)
        if (units := users.get(parameter, [])) == []:
            raise ConfigError(f"Engine: {name} belongs to none of the layers; put it into the layer that uses it")
        if len(units_of) > 1:
            rule = _on_ranks(
                rule, frozenset(at for at, theirs in enumerate(units_of) if any(u in theirs for u in units))
            )
        found.append(LogicalParameter(name, parameter, tuple(units), Census(rule, grid), role))
    return found


def held_at(
    coords: Coords, parameters: Iterable[LogicalParameter], units_of: Sequence[Collection[int]] = ()
) -> list[LocalParameter]:
    """Those of ``parameters`` that are held at ``coords``."""
    found = []
    for one in parameters:
        if (placement := one.census.rule.at(coords)) is None:
            continue
        units = one.units
        if len(units_of) > 1:
            units = tuple(unit for unit in units if unit in units_of[coords["pp"]])
        who = one.census.holders(coords)
        found.append(LocalParameter(one.name, one.parameter, units, placement, who, one.role))
    return found


def _on_ranks(rule: Rule, held_by: frozenset[int]) -> Rule:
    return Rule(lambda coords: rule.at(coords) if coords["pp"] in held_by else None, rule.axes | {"pp"})


def allot(
    module: nn.Module, parameters: Sequence[LocalParameter], seed: int, device: torch.device
) -> list[LocalParameter]:
    """Give each of ``parameters`` that is on the meta device the shape of what this rank has of it, and put it into
    ``module`` wherever the parameter was; so too, with its values, what this rank has of one that is known by one name.
    Returns the parameters as they then are.

    Of the meta device none has memory yet: who gives it some, fills it with :meth:`LocalParameter.values`.
    """
    made: dict[nn.Parameter, LocalParameter] = {}
    for one in parameters:
        if one.parameter.is_meta:
            shell = torch.empty((), dtype=one.parameter.dtype, device=device).expand(one.placement.shape)
            parameter = nn.Parameter(shell, one.parameter.requires_grad)
            made[one.parameter] = replace(one, parameter=parameter, drawn=_draw(one, seed, device))
        elif _is_part(one):
            made[one.parameter] = replace(one, parameter=_part(one))
        elif tuple(one.parameter.shape) != one.placement.shape:
            raise ConfigError(
                f"Engine: {one.name} has values already, and this rank is to hold a part of it; build the module on "
                "the meta device, and load a checkpoint into the engine"
            )
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter in made:
                setattr(owner, name, made[parameter].parameter)
    return [made.get(one.parameter, one) for one in parameters]


def _is_part(one: LocalParameter) -> bool:
    """Whether a parameter that has values is to be cut to pieces that are boxes of it as it is."""
    shape = tuple(one.parameter.shape)
    pieces = one.placement.pieces
    return (len(pieces) > 1 or shape != one.placement.shape) and all(piece.shape == shape for piece in pieces)


def _part(one: LocalParameter) -> nn.Parameter:
    local = one.parameter.detach().new_zeros(one.placement.shape)
    for piece in one.placement.pieces:
        box = tuple(slice(start, stop) for start, stop in piece.box)
        piece.of(local).copy_(one.parameter.detach()[box])
    return nn.Parameter(local, one.parameter.requires_grad)


def _draw(one: LocalParameter, seed: int, device: torch.device) -> Callable[[torch.dtype], Tensor]:
    def draw(dtype: torch.dtype) -> Tensor:
        values = torch.empty(one.placement.shape, dtype=dtype)
        init.fill(values, one.placement, seed, one.role.std)
        return values.to(device)

    return draw


def materialise(
    module: nn.Module, parameters: Sequence[LocalParameter], seed: int, device: torch.device
) -> list[LocalParameter]:
    """:func:`allot`, each parameter with memory of its own and its initial values."""
    return [settle(one) for one in allot(module, parameters, seed, device)]


def settle(one: LocalParameter) -> LocalParameter:
    """Give a parameter memory of its own, with its values."""
    one.parameter.data = one.values(one.parameter.dtype)
    mark(PARAMETERS, one.parameter)
    return replace(one, drawn=None)


def drop(layer: nn.Module, kept: Iterable[nn.Module]) -> None:
    """Take the parameters and buffers out of a layer that this rank does not run, but not out of modules that layers
    in ``kept`` share with it."""
    shared = {module for one in kept for module in one.modules()}
    for module in layer.modules():
        if module not in shared:
            for tensors in (module._parameters, module._buffers):
                tensors.update(dict.fromkeys(tensors))


def adapt(name: str, layer: nn.Module, roles: RoleTable, interpreter: Interpreter, mesh: Mesh) -> None:
    """Put the interpreter's modules into ``layer``, called ``name`` in the model, in place of those whose role calls
    for another."""
    for inner, child in list(layer.named_modules(remove_duplicate=False)):
        other = interpreter.adapt(role_of(roles, f"{name}.{inner}".strip(".")), child, mesh)
        if other is not child:
            assert inner, f"{name} is a layer and would have to be another module"
            parent, _, local = inner.rpartition(".")
            setattr(layer.get_submodule(parent), local, other)


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
