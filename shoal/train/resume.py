"""What a checkpoint remembers of its run, and whether a run may go on from one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shoal import __version__, checkpoint
from shoal.config import Config, Model, parse
from shoal.data.batches import Batches
from shoal.errors import CheckpointError, ConfigError, setting
from shoal.train.folder import run_folder
from shoal.train.setup import Source

KEPT = (
    "run.seed",
    "data.source",
    "data.seq_len",
    "data.batch",
    "data.batch_ramp",
    "data.packing",
    "data.validation",
    "data.documents",
    *(f"model.{key}" for key in Model.model_fields if key not in ("dropout", "z_loss")),
    "optimizer.name",
)
"""Settings that must not change between the parts of a run: with another it would see other samples, or its weights
and states would not fit. The layout may change, and so may the length of the run, the learning rate, and what of the
model says only how it is trained."""


def remember(config: Config, source: Source) -> dict[str, Any]:
    """What is kept with every checkpoint, as JSON."""
    return {
        "data": source.samples.fingerprint if isinstance(source, Batches) else config.data.source,
        "config": config.model_dump(mode="json", exclude_none=True),
        "shoal": __version__,
        "torch": torch.__version__,
    }


def find_newest(config: Config, source: Source) -> Path | None:
    """The newest checkpoint of the run, from which it goes on; None where its folder holds none.

    Reads the manifest, not the weights. Raises :class:`CheckpointError` when it is damaged, was made under another
    setting that must stay, or is past the last step.
    """
    found = checkpoint.latest(run_folder(config))
    if found is None:
        return None
    with advice(found):
        manifest = checkpoint.read_manifest(found)
    saved, wanted = dict(manifest.meta), remember(config, source)
    before, now = _settings(saved), _settings(wanted)
    anew = "give the run another name, or start anew with --fresh"
    for key in KEPT:
        if before.get(key) != now.get(key):
            problem = f"the checkpoint {found} was trained with {before.get(key)}"
            raise CheckpointError(setting(key, now.get(key), problem, f"set it to {before.get(key)}, {anew}"))
    if saved.get("data") != wanted["data"]:
        problem = f"the checkpoint {found} was trained on other tokens"
        key, paths = "data.sources" if config.data.sources else "data.path", ", ".join(map(str, config.data.stores))
        raise CheckpointError(setting(key, paths, problem, f"name what it saw, {anew}"))
    if manifest.step > last_step(config):
        key = "run.stop" if config.run.stop else "run.steps"
        legal = f"use at least {manifest.step}, {anew}"
        raise CheckpointError(setting(key, last_step(config), f"the checkpoint {found} is further already", legal))
    return found


def check_left(config: Config, found: Path, option: str) -> None:
    """Refuse to watch a step, as an ``option`` asks for, of a run that has none left after the checkpoint ``found``.
    Raises :class:`ConfigError`."""
    if checkpoint.read_manifest(found).step == (last := last_step(config)):
        key = "run.stop" if last < config.run.steps else "run.steps"
        legal = f"start anew with --fresh, or raise {key}"
        raise ConfigError(
            setting(option, found, f"the run is complete, and no step after {last} is left to look at", legal)
        )


@contextmanager
def advice(found: Path) -> Iterator[None]:
    """Add, to whatever is wrong with the checkpoint, how the run can go on all the same."""
    try:
        yield
    except CheckpointError as error:
        older = f"To go on from the checkpoint before, move {found} away; to start anew, use --fresh."
        raise CheckpointError(f"{error}\n{older}") from error


def last_step(config: Config) -> int:
    """The step after which this part of the run ends."""
    return min(config.run.stop or config.run.steps, config.run.steps)


def _settings(meta: dict[str, Any]) -> dict[str, Any]:
    """ "section.key" → value of the configuration in ``meta``, settings that came after it at their defaults."""
    if "config" not in meta:
        return {}
    sections = parse(meta["config"]).model_dump(mode="json")
    return {f"{section}.{key}": value for section, table in sections.items() for key, value in table.items()}
