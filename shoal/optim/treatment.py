"""Which optimizer updates which weight, and how: the run file's groups over the defaults.

By default matrices decay and vectors do not: norms and biases are not to shrink. Muon takes hidden matrices alone;
tables (embeddings, learned positions, the output matrix), vectors and whatever has more dims go to AdamW beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from shoal.config import Optimizer, ParameterGroup
from shoal.errors import ConfigError, nearest, setting
from shoal.local import LocalParameter
from shoal.model.roles import Role, RoleTable, logical_parts, role_of

TABLES = ("embed", "position", "head")
"""Roles of matrices whose rows stand for tokens or positions, each by itself: no map from one space to another."""

_REST = ParameterGroup(match="*")


@dataclass(frozen=True)
class Treatment:
    """How a weight is updated: the optimizer's ``name`` and its ``states``, the factor ``lr`` of the learning rate, and
    ``weight_decay``."""

    name: str
    lr: float = 1.0
    weight_decay: float = 0.0
    states: tuple[str, ...] = ()

    @property
    def by_matrix(self) -> bool:
        """Whether the optimizer must know which elements are one matrix."""
        return self.name == "muon"


Treat = Callable[[LocalParameter], tuple[Treatment, ...]]
"""The treatment of each piece of a parameter, all by one optimizer."""


@dataclass(frozen=True)
class _Weights:
    """The logical weights that lie side by side in one parameter."""

    names: tuple[str, ...]
    role: Role
    parameter: nn.Parameter


class Treatments:
    """The treatment of every weight under ``config``."""

    def __init__(self, config: Optimizer) -> None:
        self._config = config

    def __call__(self, one: LocalParameter) -> tuple[Treatment, ...]:
        """The treatment of each piece of a parameter."""
        return tuple(self.of(piece.name, one.role, len(piece.shape)) for piece in one.placement.pieces)

    @property
    def names(self) -> frozenset[str]:
        """The optimizers that may have work."""
        beside = {"adamw"} if self._config.name == "muon" else set()
        return frozenset({self._config.name, *beside, *(one.name for one in self._config.groups if one.name)})

    def of(self, name: str, role: Role, dims: int) -> Treatment:
        """The treatment of the logical weight called ``name``: that of the first group whose pattern matches it."""
        config, (at, group) = self._config, self._group(name)
        hidden = dims == 2 and role.kind not in TABLES
        chosen = group.name or ("adamw" if config.name == "muon" and not hidden else config.name)
        if chosen == "muon" and dims != 2:
            problem = f"{name} has {dims} dims, and Muon takes matrices"
            raise ConfigError(setting(f"optimizer.groups.{at}.name", "muon", problem, "use adamw for it"))
        decay = group.weight_decay
        if decay is None:
            decay = config.weight_decay if dims > 1 else 0.0
        return Treatment(chosen, group.lr, decay, state_names(config, chosen))

    def check(self, module: nn.Module, roles: RoleTable) -> None:
        """See that the settings suit the whole ``module``, whose parameters have their full shapes.

        Raises :class:`ConfigError` for a group that no weight comes under, for weights of one fused parameter that
        come under several optimizers, and for Muon without a matrix to train, or with matrices of several dtypes.
        """
        known = list(_weights(module, roles))
        self._check_groups([name for weights in known for name in weights.names])
        dtypes = set()
        for weights in known:
            found = {self.of(name, weights.role, weights.parameter.ndim).name for name in weights.names}
            if len(found) > 1:
                problem = f"{', '.join(weights.names)} are one matrix here, of {' and '.join(sorted(found))}"
                raise ConfigError(f"optimizer.groups: {problem}; give them one name (lr and weight_decay may differ)")
            if found == {"muon"} and weights.parameter.requires_grad:
                dtypes.add(torch.promote_types(weights.parameter.dtype, torch.float32))
        if self._config.rounding == "stochastic":
            _check_rounding(module, self.names)
        if "muon" in self.names and len(dtypes) != 1:
            problem = f"its matrices have {len(dtypes)} dtypes" if dtypes else "the model has no matrix for it to train"
            raise ConfigError(setting("optimizer.name", "muon", problem, "use adamw"))

    def _group(self, name: str) -> tuple[int, ParameterGroup]:
        """The first group that matches, and its place among the groups; after the last, the rest."""
        groups = (*self._config.groups, _REST)
        return next((at, group) for at, group in enumerate(groups) if fnmatchcase(name, group.match))

    def _check_groups(self, names: Sequence[str]) -> None:
        used = {self._group(name)[0] for name in names}
        for at, group in enumerate(self._config.groups):
            if at not in used:
                matches = any(fnmatchcase(name, group.match) for name in names)
                problem = "matches only what groups before it take" if matches else "matches no weight"
                hint = "" if matches else nearest(group.match, names)
                legal = "put it first" if matches else f"the weights have names such as {names[-1]}"
                raise ConfigError(setting(f"optimizer.groups.{at}.match", group.match, problem + hint, legal))


def _check_rounding(module: nn.Module, names: Collection[str]) -> None:
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
    problem = legal = ""
    if torch.float16 in dtypes or torch.bfloat16 not in dtypes:
        problem, legal = "is for weights in bf16", "use dtype=bf16 in the layout, or nearest"
    elif "muon" in names:
        problem, legal = "Muon works on float32 copies", "use nearest"
    if problem:
        raise ConfigError(setting("optimizer.rounding", "stochastic", problem, legal))


def state_names(config: Optimizer, name: str) -> tuple[str, ...]:
    """The state tensors of the optimizer called ``name``, each of its parameters' shape, under PyTorch's names."""
    match name:
        case "adamw":
            return ("exp_avg", "exp_avg_sq")
        case "lion":
            return ("exp_avg",)
        case "muon":
            return ("momentum_buffer",)
        case _:
            return ("momentum_buffer",) if config.momentum else ()


def _weights(module: nn.Module, roles: RoleTable) -> Iterator[_Weights]:
    for name, parameter in module.named_parameters():
        owner, _, local = name.rpartition(".")
        role = role_of(roles, owner)
        parts = tuple(part for part, _ in logical_parts(role, owner, local))
        yield _Weights(parts or (name,), role, parameter)
