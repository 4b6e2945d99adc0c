"""Recomputation (Chen et al. 2016): activations are thrown away and made again in the backward pass.

*Full* keeps the input of each layer. *Selective* (Korthikanti et al. 2022) remakes only the core of attention, which
holds much and costs little. Nothing random needs to be remembered: dropout is a function of where a value stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.model.roles import RoleTable, role_of


def recomputed(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``run``, of which only the arguments are kept for the backward pass."""

    def keeping_its_input(*arguments: Any) -> Tensor:
        result: Tensor = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)
        return result

    return keeping_its_input


class Recomputed(nn.Module):
    """A module without parameters, recomputed."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, *arguments: Any) -> Tensor:
        return recomputed(self.core)(*arguments)


def recompute_attention(name: str, layer: nn.Module, roles: RoleTable) -> None:
    """Have the core of attention in ``layer``, called ``name`` in the model, recomputed."""
    for inner, core in list(layer.named_modules()):
        if role_of(roles, f"{name}.{inner}").kind == "attention":
            parent, _, local = inner.rpartition(".")
            setattr(layer.get_submodule(parent), local, Recomputed(core))
