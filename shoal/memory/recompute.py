"""Recomputation (Chen et al. 2016): activations are thrown away and made again in the backward pass.

*Full* keeps the input of each layer. *Selective* (Korthikanti et al. 2022) remakes only the core of attention, which
costs little and holds much where its kernel keeps the scores. Nothing random needs to be remembered of Shoal's own
model: dropout is a function of where a value stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.model.roles import RoleTable, role_of


def recomputed(
    run: Callable[..., Tensor], *, buffers: Sequence[Tensor] = (), draws: bool = False
) -> Callable[..., Tensor]:
    """``run``, of which only the arguments are kept for the backward pass.

    ``buffers`` are what it reads and writes besides: the second run sees them as the first did, and leaves them as they
    are. ``draws`` says that it asks PyTorch's generators, which then answer the same again.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _as_they_were(buffers, [buffer.clone() for buffer in buffers])

    def keeping_its_input(*arguments: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return run(*arguments)
        result: Tensor = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts)
        return result

    return keeping_its_input


@contextmanager
def _as_they_were(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    now = [buffer.clone() for buffer in buffers]
    try:
        _set(buffers, values)
        yield
    finally:
        _set(buffers, now)


def _set(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)  # autograd may have saved the buffer, and need not know


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
