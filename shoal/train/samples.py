"""What training would read, to look at: the documents of a token store, or the samples of a step of a run."""

from __future__ import annotations

from pathlib import Path

from shoal import config as configuration
from shoal.config import Config
from shoal.data.batches import Batches
from shoal.data.megatron import index_path
from shoal.data.spans import Look, Part, Reader
from shoal.data.store import TokenStore
from shoal.errors import ConfigError, DataError, setting
from shoal.train.setup import Source, open_data

_DOCUMENT_TOKENS = 1000


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
