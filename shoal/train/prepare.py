"""What a run needs before any process starts: a sound token store, made from text where the run file says how, the
packages it asks for, and a checkpoint that it may go on from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from shoal.config import Config
from shoal.data.batches import Batches
from shoal.data.corpus import Corpus
from shoal.data.megatron import index_path
from shoal.data.store import TokenStore
from shoal.data.store_writer import check_free
from shoal.data.tokenize import END_OF_DOCUMENT, tokenize, train_tokenizer
from shoal.errors import DataError, setting
from shoal.layout import Layout
from shoal.memory.swap import check_folder
from shoal.train.asked import NOTHING, Asked
from shoal.train.folder import check_apart
from shoal.train.metrics import check_packages
from shoal.train.resume import check_left, find_newest
from shoal.train.samples import open_splits
from shoal.train.setup import Source, swap_folder
from shoal.train.start import check_start, tokenizer_of
from shoal.train.temporary import temporary_folder

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)."""


def prepare(config: Config, layout: Layout, progress: Progress, asked: Asked = NOTHING) -> None:
    """Find whatever would fail later, before any process starts and anything of the run is written: see
    :func:`prepare_data`, :func:`~shoal.train.resume.find_newest` unless the run starts fresh, then
    :func:`~shoal.train.folder.check_apart`, :func:`~shoal.train.start.check_start` where there is nothing to go on
    from, and :func:`~shoal.train.resume.check_left` where an option has asked to watch a step.

    Raises a :class:`~shoal.errors.ShoalError`.
    """
    check_packages(config)
    if asked.fresh:
        check_apart(config)
    if any(part.where == "nvme" for part in layout.offload):
        check_folder(swap_folder(config))
    source = prepare_data(config, progress, fresh=asked.fresh)
    found = None if asked.fresh else find_newest(config, source)
    if found is None:
        check_start(config, source)
    elif asked.watching:
        check_left(config, found, asked.watching)


def prepare_data(config: Config, progress: Progress, *, fresh: bool = False) -> Source:
    """The training samples. Makes the token store if it is missing and the run file names a text, with the tokenizer of
    the weights that the run begins with; checks the store, its checksums and its vocabulary.

    Raises :class:`~shoal.errors.DataError`.
    """
    data = config.data
    if data.source == "tokens":
        for number, path in enumerate(data.stores):
            if path.exists() or index_path(path).exists():
                continue
            given, end = tokenizer_of(config, fresh=fresh)
            if data.text is None:
                name, or_ = ("data.path", ", or name the text as data.text")
                if data.sources:
                    name, or_ = f"data.sources.{number}.path", ""
                how = f" --tokenizer {given}" if given else ""
                legal = f"make one with shoal data TEXT {path}{how}{or_}"
                raise DataError(setting(name, path, "there is no token store", legal))
            vocab = data.tokenizer_vocab or config.model.vocab
            make_store(
                data.text, path, tokenizer=given, vocab=vocab, separator=data.separator, end_of_document=end,
                progress=progress,
            )  # fmt: skip
    source, _ = open_splits(config)
    if isinstance(source, Batches):
        for store in source.samples.stores:
            store.verify(partial(progress, f"checking {store.path}"))
    return source


def make_store(
    text: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    vocab: int | None = None,
    separator: str | None = None,
    field: str | None = None,
    template: str | None = None,
    end_of_document: str = END_OF_DOCUMENT,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress,
) -> TokenStore:
    """Write the tokens of ``text`` to a store at ``out``, with ``tokenizer`` or with one of ``vocab`` entries that is
    trained on the text. Raises :class:`~shoal.errors.DataError`."""
    check_free(out, overwrite=overwrite)
    corpus = Corpus.find(text, field=field, separator=separator)
    with temporary_folder("tokenizer") as folder:
        if tokenizer is None:
            assert vocab is not None, "either a tokenizer or the size of one to train"
            progress(f"training a tokenizer on {text}", 0, corpus.size)
            tokenizer = folder / "tokenizer.json"
            train_tokenizer(corpus, vocab, template).save(str(tokenizer))
            progress(f"training a tokenizer on {text}", corpus.size, corpus.size)
        return tokenize(
            corpus,
            tokenizer,
            out,
            end_of_document=end_of_document,
            template=template,
            workers=workers,
            overwrite=overwrite,
            progress=partial(progress, f"tokenising {text}"),
        )
