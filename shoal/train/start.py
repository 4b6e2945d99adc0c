"""The weights that a run begins with, where its file names some: ``checkpoint.start``."""

from __future__ import annotations

import shutil
from pathlib import Path

from shoal import checkpoint
from shoal.checkpoint.whole import WholeTensors
from shoal.config import Config
from shoal.data.batches import Batches
from shoal.data.tokenize import END_OF_DOCUMENT, check_tokenizer, load_tokenizer
from shoal.errors import CheckpointError, setting
from shoal.model.hf import COMPANIONS as FILES
from shoal.model.hf import Weights, end_tokens, inside, is_folder, logical_shapes
from shoal.train.folder import COMPANIONS, TOKENIZER, run_folder
from shoal.train.setup import Source


def check_start(config: Config, source: Source) -> None:
    """See that the weights fit the model, and that the data was made with their tokenizer, before any process starts.

    Raises :class:`CheckpointError` and :class:`DataError`.
    """
    if (start := config.checkpoint.start) is None:
        return
    wanted, found = logical_shapes(config.model), _shapes(start)
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            there, here = (shapes.get(name, "missing") for shapes in (found, wanted))
            problem = f"of another model: {name} is {there} in it and {here} in [model]"
            raise CheckpointError(
                setting("checkpoint.start", start, problem, "take the model section from its run file")
            )
    known = _home(start) / TOKENIZER
    if isinstance(source, Batches) and known.exists():
        key = "data.sources" if config.data.sources else "data.path"
        for store in source.samples.stores:
            check_tokenizer(store, known, key, ", with which the weights were trained")


def tokenizer_of(config: Config, *, fresh: bool = False) -> tuple[Path | None, str]:
    """The tokenizer of the weights that the run begins with, None where there is none, and the token that ends a
    document of the run's own text. Unless it starts ``fresh``, a run that has saved something has a copy of them."""
    if (start := config.checkpoint.start) is None:
        return None, END_OF_DOCUMENT
    if not fresh and checkpoint.latest(run_folder(config)) is not None:
        start = run_folder(config)
    path = _home(start) / TOKENIZER
    if not path.is_file():
        return None, END_OF_DOCUMENT
    ends = end_tokens(_companions(start))
    end = load_tokenizer(path).id_to_token(min(ends)) if ends else None
    return path, end or END_OF_DOCUMENT


def keep_companions(config: Config, folder: Path) -> None:
    """Copy what lies beside the weights that the run begins with to its ``folder``: tokenizer and the files of a
    Hugging Face folder. Once it has a checkpoint of its own, the run needs nothing of where they lay."""
    if (start := config.checkpoint.start) is None:
        return
    home = _home(start)
    if (home / TOKENIZER).exists() and not (folder / TOKENIZER).exists():
        shutil.copyfile(home / TOKENIZER, folder / TOKENIZER)
    copy_companions(_companions(start), folder)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the small files of a Hugging Face folder, those that are there, to a folder in ``folder``."""
    found = {name: inside(source, name) for name in FILES if (source / name).exists()}
    if found:
        (folder / COMPANIONS).mkdir(exist_ok=True)
    for name, file in found.items():
        shutil.copyfile(file, folder / COMPANIONS / name)


def _home(start: Path) -> Path:
    """Where the tokenizer of some weights lies."""
    return start if is_folder(start) else checkpoint.resolve(start).parent


def _companions(start: Path) -> Path:
    """Where the small files of a Hugging Face folder lie."""
    return start if is_folder(start) else _home(start) / COMPANIONS


def _shapes(start: Path) -> dict[str, tuple[int, ...]]:
    if is_folder(start):
        return Weights(start).shapes
    found = checkpoint.resolve(start)
    return WholeTensors(found, checkpoint.read_manifest(found)).shapes
