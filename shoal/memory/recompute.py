"""Recomputation (Chen et al. 2016): activations are thrown away and made again in the backward pass.

*Full* keeps the input of each layer. *Selective* (Korthikanti et al. 2022) remakes only the core of attention, which
costs little and holds much where its kernel keeps the scores. Nothing random needs to be remembered of Shoal's own
model: dropout is a function of where a value stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.model.roles import RoleTable, role_of


def recomputed(
    run: Callable[..., Tensor], layer: nn.Module | None = None, *, draws: bool = False
) -> Callable[..., Tensor]:
    """``run``, of which only the arguments are kept for the backward pass.

    The second run sees the buffers of ``layer`` as the first did, and leaves them as they are. ``draws`` says that it
    asks PyTorch's generators, which then answer the same again.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _as_they_were(layer, _snapshot(layer))

    def keeping_its_input(*arguments: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return run(*arguments)
        result: Tensor = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts)
        return result

    return keeping_its_input


_Snapshot = list[tuple[nn.Module, str, Tensor, Tensor]]
"""Of each buffer: where it is, the tensor, and a copy of its values."""


def _snapshot(layer: nn.Module | None) -> _Snapshot:
    return [
        (module, name, buffer, buffer.clone())
        for module in (layer.modules() if layer is not None else ())
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


@contextmanager
def _as_they_were(layer: nn.Module | None, then: _Snapshot) -> Iterator[None]:
    now = _snapshot(layer)
    _restore(then)
    try:
        yield
    finally:
        _restore(now)


def _restore(snapshot: _Snapshot) -> None:
    for module, name, buffer, values in snapshot:
        buffer.data.copy_(values)  # autograd may have saved the buffer, and need not know
        module._buffers[name] = buffer


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
