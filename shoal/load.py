"""What the gates of a model come to in a step: how many tokens each expert is given, and the bias that answers it.

Ranks count their own tokens, of their own layers; one sum over all ranks, of a few words an expert, tells everyone. A
gate that balances by a bias (DeepSeek-V3, 2024) then moves that of each expert by a fixed step against the sign of its
excess, so that every rank that has the bias has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.collectives import all_reduce
from shoal.comm.world import Group
from shoal.errors import LayoutError, setting
from shoal.layout import Layout
from shoal.model.beside import Beside
from shoal.model.context import Batch, Context
from shoal.model.routed import Routed, Router
from shoal.result import ExpertLoad


def check_balance(layout: Layout, module: nn.Module) -> None:
    """Refuse a ``module`` with gates whose bias would answer the load of steps that have not ended. Raises
    :class:`LayoutError`."""
    if layout.delayed and any(isinstance(one, Router) and one.balances for one in module.modules()):
        problem = "a gate's bias answers the load of the step before, and steps overlap"
        raise LayoutError(setting("layout", str(layout), problem, "use model.bias_rate=0, or steps that do not"))


class Loads:
    """Those of the layers with experts among ``layers``, of which this rank runs the ``own``; ``everyone`` counts."""

    def __init__(
        self, layers: Sequence[tuple[str, nn.Module]], own: Sequence[int], everyone: Group, device: torch.device
    ) -> None:
        found = [(unit, one) for unit, (_, layer) in enumerate(layers) for one in layer.modules()]
        self._routed = {one.name: one for _, one in found if isinstance(one, Routed)}
        self._own = {one.name for unit, one in found if isinstance(one, Routed) and unit in own}
        self._everyone, self._device = everyone, device
        self._seen: list[Beside] = []

    def watch(self, contexts: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
        """``contexts`` of a step's micro-batches, which are then looked at when it ends."""
        self._seen = []
        if not self._routed:
            return contexts

        def watched(batch: Batch) -> Any:
            ctx = contexts(batch)
            if isinstance(ctx, Context):
                self._seen.append(ctx.beside)
            return ctx

        return watched

    @torch.no_grad()
    def end(self, weight: float, *, updated: bool) -> ExpertLoad | None:
        """A step has ended, whose losses have the denominator ``weight``; if it has ``updated`` weights, it updates
        biases. None without experts."""
        if not self._routed:
            return None
        table = torch.stack([self._of(name) for name in self._routed])
        all_reduce(table, self._everyone, "expert load")
        if updated:
            for (name, one), row in zip(self._routed.items(), table, strict=True):
                if name in self._own and one.router.balance is not None:
                    load = row[:-2]
                    one.router.balance += (one.router.rate * (load.mean() - load).sign()).to(one.router.balance)
        chosen, kept, losses = table[:, :-2], table[:, -2], table[:, -1]
        tokens = {name: tuple(int(n) for n in row.tolist()) for name, row in zip(self._routed, chosen, strict=True)}
        dropped = 1.0 - float(kept.sum() / chosen.sum().clamp(min=1))
        return ExpertLoad(tokens, dropped, float(losses.sum()) / (weight or 1.0))

    def _of(self, name: str) -> Tensor:
        """What this rank has seen of a layer: tokens for each expert, those not dropped, losses; float64 [E + 2]."""
        router = self._routed[name].router
        row = torch.zeros(router.out_features + 2, dtype=torch.float64, device=self._device)
        for one in self._seen:
            if name in one.loads:
                row[:-2] += one.loads[name]
                row[-2] += one.kept[name]
            if name in one.losses:
                row[-1] += one.losses[name].detach()
        return row
