"""From a run file to the things that run: data, model, engine. Everything a user can get wrong is found here first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import torch

from shoal.build import DTYPES, check_optimizers
from shoal.comm.world import World
from shoal.config import Config
from shoal.data.batch_size import BatchSize
from shoal.data.batches import Batch, Batches, Synthetic
from shoal.data.hashing import derive
from shoal.data.mixture import Mixture
from shoal.data.samples import Samples, StoreSamples
from shoal.data.store import TokenStore
from shoal.engine import Engine
from shoal.errors import LayoutError, setting
from shoal.layout import Layout
from shoal.load import check_balance
from shoal.local import LocalParameter, lay_out, materialise
from shoal.mesh import Grid
from shoal.model.decoder import Decoder
from shoal.optim.schedule import rate
from shoal.optim.treatment import Treatments
from shoal.tensor.whole import Whole
from shoal.train.folder import run_folder


class Source(Protocol):
    """Batches of any step, for any part of the data-parallel ranks."""

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch: ...


def fit(config: Config, layout: Layout, world: int) -> Layout:
    """``layout`` on ``world`` ranks, checked against the model and the batch before any process group exists.

    Raises :class:`~shoal.errors.LayoutError`, or :class:`~shoal.errors.ConfigError` where the optimizer does not suit
    the model.
    """
    layout.check_built()
    if layout.auto:
        problem = "nobody has chosen a layout here"
        legal = "use it with shoal train and shoal verify, or name a layout that shoal plan finds"
        raise LayoutError(setting("layout", str(layout), problem, legal))
    filled = layout.fill(world)
    for samples in batch_size(config).sizes():
        filled.check(config.model, samples, world)
    model, treat = make_model(config, filled), Treatments(config.optimizer)
    check_balance(filled, model)
    treat.check(model, model.roles)
    check_optimizers(filled, treat.names)
    return filled


def open_data(config: Config, split: Literal["train", "validation"] = "train") -> Source:
    """The samples of a run file. Raises :class:`~shoal.errors.DataError` where they cannot be used."""
    data, seed = config.data, config.run.seed
    size = batch_size(config) if split == "train" else BatchSize(data.batch)
    if data.source == "synthetic":
        # Validation samples are others: their seed is.
        shift = 0 if split == "train" else 1
        return Synthetic(vocab=config.model.vocab, seq_len=data.seq_len, batch=size, seed=2 * seed + shift)
    return Batches(open_samples(config, split), batch=size, split=split, documents=data.documents)


def open_samples(config: Config, split: Literal["train", "validation"] = "train") -> Samples:
    """The samples of the run file's token stores. Raises :class:`~shoal.errors.DataError`."""
    data, seed = config.data, config.run.seed

    def of(path: Path, seed: int) -> Samples:
        store = TokenStore.open(path)
        store.check_vocab(config.model.vocab)
        return StoreSamples(
            store,
            seq_len=data.seq_len,
            seed=seed,
            validation=data.validation,
            packing=data.packing,
            validates=split == "validation",
        )

    if data.path is not None:
        return of(data.path, seed)
    sources = [of(source.path, derive("source", seed, number)) for number, source in enumerate(data.sources)]
    return Mixture(sources, [source.weight for source in data.sources], seed)


def batch_size(config: Config) -> BatchSize:
    """How many samples each training step takes."""
    return BatchSize(config.data.batch, config.data.batch_ramp)


def make_model(config: Config, layout: Layout) -> Decoder:
    """The decoder of a run file on the meta device: shapes and names, no memory."""
    with torch.device("meta"):
        return Decoder(config.model).to(DTYPES[layout.dtype])


def materialise_alone(model: Decoder, seed: int) -> list[LocalParameter]:
    """Give all of ``model`` memory and its initial weights, as one process has it that is alone; on the CPU."""
    grid = Grid((("dp", 1),))
    parameters = lay_out(model, model.layers(), model.roles, Whole(), grid, grid.coords(0))
    return materialise(model, parameters, seed, torch.device("cpu"))


def learning_rate(config: Config) -> Callable[[int], float]:
    """The share of the highest learning rate at each step of the run."""
    return lambda step: rate(config.schedule, step, config.run.steps)


def make_engine(config: Config, layout: Layout, world: World) -> Engine:
    """The engine of a run file under ``layout``."""
    return Engine(
        make_model(config, layout),
        layout,
        optimizer=config.optimizer,
        rate=learning_rate(config),
        seed=config.run.seed,
        world=world,
        swap=swap_folder(config),
    )


def swap_folder(config: Config) -> Path:
    """Where what is to be on a disk goes: ``memory.swap``, or the run's folder, or the first above it that there is, as
    nothing is left there."""
    if config.memory.swap is not None:
        return config.memory.swap
    folder = run_folder(config)
    return next((one for one in (folder, *folder.absolute().parents) if one.is_dir()), folder)
