"""What an engine asks of a model, and how a module that knows nothing of Shoal answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from shoal.errors import ConfigError
from shoal.model.context import Batch
from shoal.model.roles import RoleTable

TRAINABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Task(Protocol):
    """A model as a list of layers that ends in a summed loss.

    The loss of a step is the sum of ``loss`` over its micro-batches divided by the sum of ``weight`` over all ranks,
    so that it is the same mean however the samples are divided.
    """

    @property
    def module(self) -> nn.Module:
        """The modules that hold the parameters, under the names that checkpoints use."""

    @property
    def roles(self) -> RoleTable:
        """Which module plays which part; empty when none needs to be known."""

    def layers(self) -> list[tuple[str, nn.Module]]:
        """The layers in the order in which they run, by name. A pipeline cuts between them."""

    def weight(self, batch: Batch) -> Tensor:
        """The denominator that these samples bring to the loss: a scalar, known before any forward pass."""

    def context(self, batch: Batch, *, seed: int = 0, step: int = 0, train: bool = False) -> Any:
        """What every layer may know of a micro-batch. It depends on the arguments alone."""

    def enter(self, batch: Batch) -> Tensor:
        """The input of the first layer."""

    def apply_layer(self, layer: nn.Module, x: Tensor, ctx: Any) -> Tensor:
        """The output of one layer."""

    def loss(self, output: Tensor, ctx: Any) -> Tensor:
        """The loss of a micro-batch, summed over what ``weight`` counts."""


class PlainTask:
    """A user's own module as it is: one layer, or the layers of an ``nn.Sequential``.

    ``loss(output, batch)`` returns the loss summed over the samples; ``weight(batch)`` what to divide the sum by, the
    number of samples if it is not given. The module is called with ``batch["inputs"]``.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Tensor, Batch], Tensor],
        weight: Callable[[Batch], Tensor] | None = None,
    ) -> None:
        self.module = module
        self.roles: RoleTable = {}
        self._loss, self._weight = loss, weight

    @property
    def runs_its_layers(self) -> bool:
        """Whether the module is a list of layers already."""
        return _runs_its_layers(self.module)

    def layers(self) -> list[tuple[str, nn.Module]]:
        if _runs_its_layers(self.module):
            # Not named_children: a layer that occurs twice runs twice.
            return [(str(place), layer) for place, layer in enumerate(self.module)]
        return [("", self.module)]

    def weight(self, batch: Batch) -> Tensor:
        if self._weight is not None:
            return self._weight(batch)
        return torch.tensor(len(batch["inputs"]))

    def context(self, batch: Batch, *, seed: int = 0, step: int = 0, train: bool = False) -> Batch:
        return batch

    def enter(self, batch: Batch) -> Tensor:
        if "inputs" not in batch:
            raise ConfigError(f'Engine: the module is called with batch["inputs"]; the batch has {sorted(batch)}')
        return batch["inputs"]

    def apply_layer(self, layer: nn.Module, x: Tensor, ctx: Batch) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    def loss(self, output: Tensor, ctx: Batch) -> Tensor:
        loss = self._loss(output, ctx)
        if not isinstance(loss, Tensor) or loss.ndim:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(f"Engine: loss returned {found}; return a scalar tensor, summed over the samples")
        return loss


def _runs_its_layers(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether calling the module is calling its layers in turn, and nothing else."""
    own = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    own = own and not (module._parameters or module._buffers)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return own and not any(getattr(module, kind) for kind in hooks)


def as_task(
    model: nn.Module | Task,
    loss: Callable[[Tensor, Batch], Tensor] | None,
    weight: Callable[[Batch], Tensor] | None,
) -> Task:
    """``model`` itself, if it answers as a task does, or with its ``loss``. Raises :class:`ConfigError` where that is
    missing."""
    if hasattr(model, "layers") and hasattr(model, "apply_layer"):
        return cast(Task, model)
    if loss is None:
        raise ConfigError(
            f"Engine: {type(model).__name__} needs a loss; pass loss=lambda output, batch: the loss summed over samples"
        )
    return PlainTask(cast(nn.Module, model), loss, weight)


def check_module(module: nn.Module) -> None:
    """Refuse what no optimizer or bucket here can take, and a module that has an engine."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"Engine: {name} has no shape yet; run the module once before")
        if parameter.is_complex():
            raise ConfigError(f"Engine: {name} is complex; keep its real and imaginary parts as two parameters")
        if parameter.requires_grad and parameter.dtype not in TRAINABLE:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in TRAINABLE)
            raise ConfigError(
                f"Engine: {name} is {parameter.dtype} and trains; keep it in one of {known}, or freeze it"
            )
        if getattr(parameter, "main", None) is not None:
            raise ConfigError(f"Engine: {name} belongs to another engine; build another module")
    for name, child in module.named_modules():
        if getattr(child, "sparse", False):
            raise ConfigError(f"Engine: {name} makes sparse gradients; build it with sparse=False")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """``module`` in evaluation mode, then each of its modules as it was: a user may have frozen some of them."""
    before = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in before:
            one.training = training
