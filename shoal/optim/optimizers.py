"""One update of everything that a rank has, by all the optimizers that have a part in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.optim.fused import Fused
from shoal.optim.lion import Lion
from shoal.optim.muon import Muon
from shoal.optim.rounding import Rounding
from shoal.optim.runs import Run
from shoal.optim.treatment import Treatments


class _Updates(Protocol):
    """One optimizer with its runs."""

    def update(self, lr: float, factor: float) -> None: ...

    def set_steps(self, steps: int) -> None: ...


class Updater:
    """Updates runs of parameters in place from their gradients.

    The states are given and exist from the start, so that a checkpoint can be read straight into them. All ranks of
    ``world`` make and use theirs together, as Muon's matrices may be divided over them.
    """

    def __init__(self, config: Optimizer, runs: Sequence[Run], world: World, seed: int = 0) -> None:
        self._lr, self._rounding = config.lr, Rounding(seed)
        self._optimizers: list[_Updates] = []
        for name in sorted(Treatments(config).names, reverse=True):
            mine = [run for run in runs if run.treatment.name == name]
            if name == "muon":
                self._optimizers.append(Muon(config, mine, world))  # with nothing of its own too: others ask
            elif mine:
                self._optimizers.append(self._elementwise(name, config, mine))

    def update(self, rate: float, factor: float = 1.0) -> float:
        """One step on the gradients times ``factor``, at ``rate`` times the configured learning rate, which is
        returned."""
        lr = self._lr * rate
        self._rounding.updates += 1
        for optimizer in self._optimizers:
            optimizer.update(lr, factor)
        return lr

    @property
    def updates(self) -> int:
        """How many updates the states stand for."""
        return self._rounding.updates

    def set_steps(self, steps: int) -> None:
        """How many updates the states stand for."""
        self._rounding.updates = steps
        for optimizer in self._optimizers:
            optimizer.set_steps(steps)

    def _elementwise(self, name: str, config: Optimizer, runs: Sequence[Run]) -> _Updates:
        return Lion(config, runs, self._rounding) if name == "lion" else Fused(name, config, runs, self._rounding)
