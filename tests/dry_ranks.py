"""What a rank of a real run takes, as a dry run tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shoal.comm.backends import shared
from shoal.comm.ledger import Entry
from shoal.comm.world import World
from shoal.config import Config
from shoal.layout import Layout
from shoal.memory.account import RankMemory
from shoal.model import gates
from shoal.train.dryrun import DryRun, samples_of
from shoal.train.metering import Metering, step_measured
from shoal.train.setup import make_engine

FIRST_BYTES = 256
"""What ranks tell each other in a first step, about samples and about the form of what stages hand over."""


def measured(world: World, config: Config, layout: Layout) -> tuple[RankMemory, list[Entry], list[str]]:
    """Memory, what was received, and the actions, of the step that is measured."""
    with patch.object(shared._Sum, "_add_up", _unseen(shared._Sum._add_up)):
        return whole(world, config, layout)


def evenly(world: World, config: Config, layout: Layout) -> tuple[RankMemory, list[Entry], list[str]]:
    """As :func:`measured`, of gates that give every expert as many of any E/k tokens in a row."""
    with patch.object(gates, "choose", _in_turn(gates.choose)):
        return measured(world, config, layout)


def _in_turn(choose: Any) -> Any:
    def in_turn(scores_STE: Tensor, gate: gates.Gate, bias_E: Tensor | None = None) -> Tensor:
        chosen: Tensor = choose(scores_STE, gate, bias_E)
        with _disable_current_modes(), torch.no_grad():
            first = gate.chosen * torch.arange(chosen.shape[1])[:, None]
            turns = (first + torch.arange(gate.chosen)) % gate.experts
            return chosen.zero_().scatter_(-1, turns.expand(len(chosen), -1, -1), True)

    return in_turn


def _unseen(of_carrier: Any) -> Any:
    """What shared memory itself works in, other ranks' memory and up to 256 KiB, is no part of a job."""

    def unseen(*arguments: Any) -> None:
        with _disable_current_modes():
            of_carrier(*arguments)

    return unseen


def whole(world: World, config: Config, layout: Layout) -> tuple[RankMemory, list[Entry], list[str]]:
    """With what shared memory works in."""
    metering, steps = Metering(Path()), step_measured(layout) + 1
    with metering.building():
        engine = make_engine(config, layout, world)
    batch = samples_of(config)(engine.mesh.coords["dp"], layout.dp)
    metering.begin(engine, steps)
    for step in range(steps):
        world.ledger.clear()
        engine.recorder.on = step == steps - 1
        with metering.around(step):
            engine.step(batch)
    assert metering.found is not None
    actions = [str(event.act) for run in engine.recorder.runs for event in run]
    return metering.found, world.ledger.entries(), actions


def as_real(found: DryRun, memory: RankMemory, received: list[Entry], actions: list[str], rel: float = 0.0) -> None:
    """Everything is the same; bytes of a category up to ``rel`` of all that there are in its phase."""
    assert list(map(str, found.actions)) == actions
    assert list(found.received) == received
    assert found.memory.phases.keys() == memory.phases.keys()
    for phase, real in memory.phases.items():
        dry = found.memory.phases[phase]
        assert dry.host == real.host
        for category in {*real.device, *dry.device}:
            held = dry.device.get(category, 0), real.device.get(category, 0)
            assert abs(held[0] - held[1]) <= rel * real.total + FIRST_BYTES, (found.memory.name, phase, category, held)
        assert abs(dry.total - real.total) <= rel * real.total + FIRST_BYTES, (
            found.memory.name,
            phase,
            dry.total,
            real.total,
        )
