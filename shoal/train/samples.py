"""The samples that a run reads: to train and validate on, and to look at."""

from __future__ import annotations

from pathlib import Path

from shoal import config as configuration
from shoal.config import Config
from shoal.data.batches import Batches
from shoal.data.megatron import index_path
from shoal.data.spans import Look, Part, Reader
from shoal.data.store import TokenStore
from shoal.errors import ConfigError, DataError, setting
from shoal.train.setup import Source, batch_size, open_data, open_samples

_DOCUMENT_TOKENS = 1000


def open_splits(config: Config) -> tuple[Source, Source | None]:
    """The training samples, and those of the validation split, None where nothing is kept for it. Stores are opened
    and packed once for both. Raises :class:`~shoal.errors.DataError`."""
    data = config.data
    if data.source == "synthetic":
        return open_data(config), open_data(config, "validation")
    samples = open_samples(config, "validation" if data.validation else "train")
    train = Batches(samples, batch=batch_size(config), documents=data.documents)
    if not data.validation:
        return train, None
    return train, Batches(samples, batch=data.batch, split="validation", documents=data.documents)


def look(path: Path, count: int, step: int | None = None) -> Look:
    """The first ``count`` documents of a token store, or samples of ``step`` (counted from 0; default 0) of a run: of
    a run file, or of the folder of a run. Raises a :class:`~shoal.errors.ShoalError` where there is neither."""
    if path.suffix == ".toml" or (path / "run.toml").is_file():
        config = configuration.load(path if path.suffix == ".toml" else path / "run.toml")
        return _run(config, count, step or 0)
    if not (path / "meta.json").is_file() and not index_path(path).is_file():
        raise ConfigError(f"{path}: neither a token store, nor a run file, nor the folder of a run; name one of these")
    if step is not None:
        raise ConfigError(setting("--step", step, f"{path} is a token store, which has no steps", "name a run file"))
    store = TokenStore.open(path)
    reader = Reader(store)
    documents = range(min(count, len(store.documents) - 1))
    return Look(tuple(reader.document(number, _DOCUMENT_TOKENS) for number in documents))


def parts_of(source: Source) -> tuple[Part, ...]:
    """The stores that a run reads; none of synthetic tokens."""
    if not isinstance(source, Batches):
        return ()
    samples = source.samples
    parts = zip(samples.stores, samples.shares, samples.statistics, strict=True)
    return tuple(Part(store.path, share, packing) for store, share, packing in parts)


def _run(config: Config, count: int, step: int) -> Look:
    batches = open_data(config)
    if not isinstance(batches, Batches):
        raise DataError(setting("data.source", config.data.source, "its tokens are no text", 'use source = "tokens"'))
    numbers, rows = batches.rows(step)
    readers = [Reader(store) for store in batches.samples.stores]
    origins = batches.samples.origins(numbers).tolist()
    shown = [
        readers[origins[row]].sample(number, rows, row) for row, number in enumerate(numbers[:count].tolist())
    ]  # fmt: skip
    return Look(tuple(shown), step, parts_of(batches))
