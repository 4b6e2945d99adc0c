"""Run files: every setting of a run, read from TOML and validated before anything starts."""

from __future__ import annotations

from shoal.config.attention import Latent, RopeScaling
from shoal.config.run_file import Config, Model, Optimizer, ParameterGroup, Schedule, load, parse, toml

__all__ = [
    "Config",
    "Latent",
    "Model",
    "Optimizer",
    "ParameterGroup",
    "RopeScaling",
    "Schedule",
    "load",
    "parse",
    "toml",
]
