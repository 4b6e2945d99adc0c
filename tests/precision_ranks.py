"""What the tests of engines in half precision share: a tiny run, and some steps of it."""

from __future__ import annotations

from pathlib import Path

from shoal.comm.world import World
from shoal.config import Config, load
from shoal.engine import Engine, StepResult
from shoal.layout import Layout
from shoal.train.setup import make_engine, open_data

TINY = Path(__file__).parents[1] / "runs" / "tiny.toml"


def read(*settings: str) -> Config:
    return load(TINY, ["data.seq_len=16", "model.vocab=96", "model.layers=2", "model.dropout=0", *settings])


def make(world: World, config: Config, line: str) -> Engine:
    return make_engine(config, Layout.parse(line), world)


def train(engine: Engine, config: Config, steps: int) -> list[StepResult]:
    source, coords = open_data(config), engine.mesh.coords
    first = engine.steps_done
    return [engine.step(source.batch(first + n, coords["dp"], engine.layout.dp)) for n in range(steps)]
