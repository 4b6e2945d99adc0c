"""What a rank of a real run takes, as a dry run tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import _disable_current_modes

from shoal.comm.backends import shared
from shoal.comm.ledger import Entry
from shoal.comm.world import World
from shoal.config import Config
from shoal.layout import Layout
from shoal.memory.account import RankMemory
from shoal.train.dryrun import samples_of
from shoal.train.metering import Metering, step_measured
from shoal.train.setup import make_engine


def measured(world: World, config: Config, layout: Layout) -> tuple[RankMemory, list[Entry], list[str]]:
    """Memory, what was received, and the actions, of the step that is measured."""
    with patch.object(shared._Sum, "_add_up", _unseen(shared._Sum._add_up)):
        return _measured(world, config, layout)


def _unseen(of_carrier: Any) -> Any:
    """What shared memory itself works in, other ranks' memory and up to 256 KiB, is no part of a job."""

    def unseen(*arguments: Any) -> None:
        with _disable_current_modes():
            of_carrier(*arguments)

    return unseen


def _measured(world: World, config: Config, layout: Layout) -> tuple[RankMemory, list[Entry], list[str]]:
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
