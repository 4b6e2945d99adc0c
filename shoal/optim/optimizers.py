"""One update of everything that a rank has, by all the optimizers that have a part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
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
    ``world`` make and use theirs together, as Muon's matrices may be divided over them: they come first, and the others
    in turn.
    """

    def __init__(self, config: Optimizer, runs: Sequence[Run], world: World, seed: int = 0) -> None:
        self._lr, self._rounding = config.lr, Rounding(seed)
        self._optimizers: list[tuple[_Updates, list[int]]] = []
        """With the turns whose runs it updates."""
        for name in sorted(Treatments(config).names, reverse=True):
            mine = sorted((run for run in runs if run.treatment.name == name), key=lambda run: run.turn)
            if name == "muon":  # with nothing of its own too: others ask
                self._optimizers.append((Muon(config, mine, world), list(dict.fromkeys(run.turn for run in mine))))
                continue
            for turn, together in groupby(mine, key=lambda run: run.turn):
                self._optimizers.append((self._elementwise(name, config, list(together)), [turn]))

    def update(self, rate: float, factor: float = 1.0, updated: Callable[[int], None] = lambda _: None) -> float:
        """One step on the gradients times ``factor``, at ``rate`` times the configured learning rate, which is
        returned. ``updated(turn)`` is called as the runs of a turn, which have one optimizer, are done."""
        lr = self._lr * rate
        self._rounding.updates += 1
        for optimizer, turns in self._optimizers:
            optimizer.update(lr, factor)
            for turn in turns:
                updated(turn)
        return lr

    @property
    def updates(self) -> int:
        """How many updates the states stand for."""
        return self._rounding.updates

    def set_steps(self, steps: int) -> None:
        """How many updates the states stand for."""
        self._rounding.updates = steps
        for optimizer, _ in self._optimizers:
            optimizer.set_steps(steps)

    def _elementwise(self, name: str, config: Optimizer, runs: Sequence[Run]) -> _Updates:
        return Lion(config, runs, self._rounding) if name == "lion" else Fused(name, config, runs, self._rounding)
