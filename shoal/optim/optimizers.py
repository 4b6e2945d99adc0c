"""One update of everything that a rank has, by all the optimizers that have a part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import torch

from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.optim.away import Shelf, in_turn
from shoal.optim.fused import Fused
from shoal.optim.host import host_adamw, native
from shoal.optim.lion import Lion
from shoal.optim.muon import Muon
from shoal.optim.rounding import Rounding
from shoal.optim.runs import HALVES, Run
from shoal.optim.treatment import Treatments


class _Updates(Protocol):
    """One optimizer with its runs."""

    def update(self, lr: float, factor: float) -> None: ...

    def set_steps(self, steps: int) -> None: ...


class _OnePass:
    """AdamW in one pass over memory, for runs on the CPU that are not in half precision."""

    def __init__(self, config: Optimizer, runs: Sequence[Run], rounding: Rounding) -> None:
        self._config, self._runs, self._rounding = config, runs, rounding

    @torch.no_grad()
    def update(self, lr: float, factor: float) -> None:
        """One step on the gradients times ``factor``, which stay as they are. A copy in half precision is written in
        the same pass."""
        config = self._config
        for run in self._runs:
            half = run.copy if run.copy is not None and run.copy.dtype in HALVES else None
            host_adamw(
                run.params,
                run.grads().reshape(-1),
                run.states["exp_avg"],
                run.states["exp_avg_sq"],
                lr=lr * run.treatment.lr,
                betas=config.betas,
                eps=config.eps,
                weight_decay=run.treatment.weight_decay,
                step=self._rounding.updates,
                factor=factor,
                half=half,
            )
            if run.copy is not None and half is None:
                run.copy.copy_(run.params)

    def set_steps(self, steps: int) -> None:
        """They are counted elsewhere."""


class Updater:
    """Updates runs of parameters in place from their gradients, and ``shelves``, which it has brought in one by one.

    The states are given and exist from the start, so that a checkpoint can be read straight into them. All ranks of
    ``world`` make and use theirs together, as Muon's matrices may be divided over them: they come first, and the others
    in turn.
    """

    def __init__(
        self, config: Optimizer, runs: Sequence[Run], world: World, seed: int = 0, shelves: Sequence[Shelf] = ()
    ) -> None:
        self._config, self._lr, self._rounding, self._shelves = config, config.lr, Rounding(seed), shelves
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
        in_turn(self._shelves, lambda runs: self._update_shelf(runs, lr, factor))
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

    def _update_shelf(self, runs: Sequence[Run], lr: float, factor: float) -> None:
        if not runs:
            return
        optimizer = self._elementwise(runs[0].treatment.name, self._config, runs)
        optimizer.set_steps(self._rounding.updates - 1)
        optimizer.update(lr, factor)
        for run in runs:
            if run.copy is not None and not isinstance(optimizer, _OnePass):
                run.copy.copy_(run.params)

    def _elementwise(self, name: str, config: Optimizer, runs: Sequence[Run]) -> _Updates:
        if name == "lion":
            return Lion(config, runs, self._rounding)
        # On the CPU an update is a matter of passes over memory, wherever it is accounted for.
        wide = all(run.params.device.type == "cpu" and run.params.dtype not in HALVES for run in runs)
        if name == "adamw" and wide and native() is not None:
            return _OnePass(config, runs, self._rounding)
        return Fused(name, config, runs, self._rounding)
