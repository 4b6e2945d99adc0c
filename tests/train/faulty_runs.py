"""Runs that are to fail or to be ended, and what is left of them."""

from __future__ import annotations

from pathlib import Path

from whole_runs import until

from shoal import checkpoint
from shoal import config as configuration
from shoal.comm.world import World
from shoal.layout import Layout
from shoal.train.setup import make_engine


def saved_step(run: Path) -> int:
    """The step of the latest checkpoint; 0 before the first."""
    found = checkpoint.latest(run)
    return int(found.name.removeprefix("step-").removesuffix(".old")) if found else 0


def under_way(run: Path, step: int = 3) -> None:
    """Wait until the run has saved ``step``."""
    until(lambda: saved_step(run) >= step, 60)


def loads(run: Path) -> int:
    """Load the latest checkpoint whole, into an engine; returns its step."""
    config = configuration.load(run / "run.toml")
    engine = make_engine(config, Layout.parse("dtype=float64"), World())
    found = checkpoint.latest(run)
    assert found is not None
    checkpoint.verify(found)
    engine.load(found)
    assert saved_step(run) == engine.steps_done
    return engine.steps_done
