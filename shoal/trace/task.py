"""A user's own module, traced: as layers that a pipeline can cut, and with roles that tensor parallelism can read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, setting
from shoal.model.context import Batch
from shoal.model.task import PlainTask
from shoal.trace.capture import Captured, capture
from shoal.trace.infer import Inferred, infer, table
from shoal.trace.sections import Section, Traced, sections


class TracedTask(PlainTask):
    """What an engine asks of a traced model. Its :attr:`layers` compute what the module would, and have its parameters
    under the names that they have there.

    ``example`` is a batch, of which the shapes are read: sizes of its input that the module itself does not fix may be
    others later. With ``divided`` the roles of its modules are inferred; without, they are not needed. Raises
    :class:`ConfigError` where the module cannot be traced.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Tensor, Batch], Tensor],
        weight: Callable[[Batch], Tensor] | None = None,
        *,
        example: Batch,
        device: torch.device,
        divided: bool,
    ) -> None:
        super().__init__(module, loss, weight)
        self.captured: Captured = capture(module, self.enter(example))
        self.inferred: Inferred = infer(self.captured)
        if divided:
            self.roles = self.inferred.roles
        self._prelude, self._layers = sections(self.captured, self.inferred.spread.reached, device)

    def layers(self) -> list[tuple[str, nn.Module]]:
        return [("", layer) for layer in self.sections]

    @property
    def sections(self) -> list[Section]:
        """The layers as what they are."""
        return self._layers

    @property
    def shared_buffers(self) -> list[str]:
        """The buffers that several layers read."""
        return self._prelude.buffers

    def context(self, batch: Batch, *, seed: int = 0, step: int = 0, train: bool = False) -> Any:
        found, traced = self.enter(batch).shape, self.captured.shape
        if len(found) != len(traced) or any(n not in (None, own) for own, n in zip(found, traced, strict=True)):
            sizes = ", ".join("any" if n is None else str(n) for n in traced)
            problem = f"the module was traced with inputs of [{sizes}]"
            raise ConfigError(setting('batch["inputs"].shape', list(found), problem, "give such an example"))
        return self._prelude(batch)

    def apply_layer(self, layer: nn.Module, x: Tensor, ctx: Traced) -> Tensor:  # type: ignore[override]
        return layer(x, ctx)  # type: ignore[no-any-return]

    def loss(self, output: Tensor, ctx: Traced) -> Tensor:  # type: ignore[override]
        return super().loss(output, ctx.batch)


def describe(module: nn.Module, inputs: Tensor) -> str:
    """The roles inferred for a module that is called with ``inputs``, as a table to print: a line for each kind of
    module, blocks told once; beside a matrix that every rank keeps whole, the operator because of which."""
    return table(infer(capture(module, inputs)))
