"""What a run needs before any process starts: a sound token store, made from text where the run file says how."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shoal.config import Config
from shoal.data.batches import Batches
from shoal.data.corpus import Corpus
from shoal.data.store import TokenStore
from shoal.data.store_writer import check_free
from shoal.data.tokenize import tokenize, train_tokenizer
from shoal.errors import ConfigError, setting
from shoal.train.loop import run_folder
from shoal.train.setup import open_data

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)."""


def prepare(config: Config, progress: Progress) -> None:
    """Make the token store if it is missing and the run file names a text; check the store, its checksums and its
    vocabulary. Raises :class:`~shoal.errors.DataError` or :class:`ConfigError` for whatever would fail later."""
    data = config.data
    if data.source != "tokens":
        return
    assert data.path is not None
    if data.text is not None and not data.path.exists():
        vocab = data.tokenizer_vocab or config.model.vocab
        make_store(data.text, data.path, vocab=vocab, separator=data.separator, progress=progress)
    source = open_data(config)
    assert isinstance(source, Batches)
    if data.validation:
        open_data(config, "validation")
    source.store.verify(partial(progress, f"checking {data.path}"))


def make_store(
    text: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    vocab: int | None = None,
    separator: str | None = None,
    field: str = "text",
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress,
) -> TokenStore:
    """Write the tokens of ``text`` to a store at ``out``, with ``tokenizer`` or with one of ``vocab`` entries that is
    trained on the text. Raises :class:`~shoal.errors.DataError`."""
    check_free(out, overwrite=overwrite)
    corpus = Corpus.find(text, field=field, separator=separator)
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        if tokenizer is None:
            assert vocab is not None, "either a tokenizer or the size of one to train"
            progress(f"training a tokenizer on {text}", 0, corpus.size)
            tokenizer = Path(folder) / "tokenizer.json"
            train_tokenizer(corpus, vocab).save(str(tokenizer))
            progress(f"training a tokenizer on {text}", corpus.size, corpus.size)
        return tokenize(
            corpus,
            tokenizer,
            out,
            workers=workers,
            overwrite=overwrite,
            progress=partial(progress, f"tokenising {text}"),
        )


def start_afresh(config: Config) -> Path | None:
    """Move an earlier run of the same name aside, so that this one starts at step 0; returns where it went."""
    folder = run_folder(config)
    if not folder.exists():
        return None
    for number in range(1, 1000):
        aside = folder.with_name(f"{folder.name}.old-{number}")
        if not aside.exists():
            shutil.move(folder, aside)
            return aside
    legal = f"remove some of {folder}.old-*"
    raise ConfigError(setting("run.name", config.run.name, "a thousand earlier runs have been moved aside", legal))
