"""A layout tried for a few steps on the devices that there are: how long a step takes, and the most that a rank holds.

Samples are random ones in the form of the run file's, so that no data is read and nothing is written.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from shoal.comm.collectives import barrier
from shoal.comm.world import World
from shoal.config import Config
from shoal.layout import Layout
from shoal.train.dryrun import samples_of
from shoal.train.metering import Metering, step_measured
from shoal.train.pool import Pool
from shoal.train.setup import make_engine

STEPS = 5
_WARM = 1
"""Steps that are not timed: they bring into being what stays. The one that is metered follows."""


@dataclass(frozen=True)
class Trial:
    """What was seen: seconds of each timed step on the slowest rank, of the processor on all ranks together, and the
    bytes of the rank that holds most, by rank."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    peaks: tuple[int, ...]

    @property
    def step_s(self) -> float:
        """The median step's."""
        return median(self.wall_s)

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks)


def trial(config: Config, layout: Layout, pool: Pool, steps: int = STEPS) -> Trial:
    """Run ``layout``, which is filled in and fits, for ``steps`` timed steps in the processes of ``pool``."""
    seen = pool.run(run_trial, config, layout, steps, ranks=layout.ranks, device=config.run.device)
    walls, cpus = ([one[at] for one in seen] for at in (0, 1))
    return Trial(
        tuple(max(step) for step in zip(*walls, strict=True)),
        tuple(sum(step) for step in zip(*cpus, strict=True)),
        tuple(one[2] for one in seen),
    )


def run_trial(world: World, config: Config, layout: Layout, steps: int) -> tuple[list[float], list[float], int]:
    """One rank's seconds of each step, wall and processor, and the bytes it holds at its fullest moment."""
    metering = Metering(Path())
    with metering.building():
        engine = make_engine(config, layout, world)
    engine.overlap = True  # as in a run
    batch = samples_of(config)(engine.mesh.coords["dp"], layout.dp)
    before = step_measured(layout) + _WARM
    metering.begin(engine, before + steps)
    wall, cpu = list[float](), list[float]()
    for step in range(before + steps):
        if step == before:
            gc.collect()
        barrier(world.everyone)
        began, worked = time.perf_counter(), time.process_time()
        with metering.around(step):
            engine.step(batch)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        if step >= before:
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - worked)
    engine.drain()
    assert metering.found is not None, "one step was metered"
    return wall, cpu, metering.found.phases[metering.found.highest].total
