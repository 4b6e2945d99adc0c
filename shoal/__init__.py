"""Shoal trains language models across many devices under any parallel layout, and proves that the layout computes
what one device would."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.comm.world import World as World
    from shoal.comm.world import init as init
    from shoal.config import Optimizer as Optimizer
    from shoal.engine import Engine as Engine
    from shoal.layout import Layout as Layout
    from shoal.result import StepResult as StepResult
    from shoal.trace.task import describe as describe
    from shoal.train.importing import load_hf as load_hf

__version__ = "0.1.0"

_HOME = {
    "Engine": "shoal.engine",
    "StepResult": "shoal.result",
    "Layout": "shoal.layout",
    "Optimizer": "shoal.config",
    "World": "shoal.comm.world",
    "init": "shoal.comm.world",
    "describe": "shoal.trace.task",
    "load_hf": "shoal.train.importing",
}
__all__ = ["Engine", "Layout", "Optimizer", "StepResult", "World", "describe", "init", "load_hf"]


def __getattr__(name: str) -> Any:
    """Import on first use: a command that needs no torch does not wait for it."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute '{name}'")
