"""A run's folder: where it lies, who is at work in it, and how an earlier run is moved aside."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from shoal.config import Config
from shoal.errors import ConfigError, setting

TOKENIZER = "tokenizer.json"
COMPANIONS = "hf"
"""The folder, beside checkpoints, of what a Hugging Face folder had besides weights and tokenizer."""
_LOCK = ".lock"
# A run that was killed holds its lock until the kernel has ended the last of its processes.
_PATIENCE_S = 1.0


def run_folder(config: Config) -> Path:
    """Where a run keeps its checkpoints, metrics, configuration and tokenizer."""
    return config.run.folder / config.run.name


@contextmanager
def made_whole(path: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes ``path`` when the block ends without an error; otherwise nothing is left.

    Raises :class:`ConfigError` when ``path`` exists.
    """
    check_absent(path)
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    aside.mkdir()
    try:
        yield aside
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_absent(path: Path) -> None:
    """Raise :class:`ConfigError` when something is at ``path``: worth asking before any work."""
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path}: exists already and is left alone; name a new folder, or remove it")


@contextmanager
def occupy(config: Config) -> Iterator[None]:
    """Make the run's folder if it is missing and keep others out of it.

    Processes forked meanwhile hold the folder too: it is free when the last of them has ended. Raises
    :class:`ConfigError` when another run is at work there, or when the folder cannot be written.
    """
    folder = run_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _not_written(config, folder, error) from None
    try:
        if not _taken(lock):
            who = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
            problem = f"{who} is training in {folder}"
            raise ConfigError(setting("run.name", config.run.name, problem, "wait for it, end it, or use another name"))
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(lock)


def _taken(lock: int) -> bool:
    """Take the lock; False when another process keeps it."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        except OSError:  # a file system without locks: nothing keeps others out, and nothing can
            return True
        else:
            return True


def move_aside(config: Config) -> Path | None:
    """Move what an earlier run left to a new folder beside the run's, which stays, and stays held; where to, None where
    nothing was left. To be done when nothing can be refused any more.

    Raises :class:`ConfigError` where the folder beside cannot be written.
    """
    folder = run_folder(config)
    left = [path for path in folder.iterdir() if path.name != _LOCK] if folder.is_dir() else []
    if not left:
        return None
    try:
        aside = _new_beside(folder, config)
        for path in left:
            path.rename(aside / path.name)
    except OSError as error:
        raise _not_written(config, folder.parent, error) from None
    return aside


def _new_beside(folder: Path, config: Config) -> Path:
    for number in range(1, 1000):
        aside = folder.with_name(f"{folder.name}.old-{number}")
        with suppress(FileExistsError):
            aside.mkdir()
            return aside
    legal = f"remove some of {folder}.old-*"
    raise ConfigError(setting("run.name", config.run.name, "a thousand earlier runs have been moved aside", legal))


def check_apart(config: Config) -> None:
    """Refuse to move aside what the run itself needs: weights, data or a swap folder in the run's folder.

    Raises :class:`ConfigError`.
    """
    folder, data = run_folder(config), config.data
    needed = {
        "checkpoint.start": config.checkpoint.start,
        "data.text": data.text,
        "data.path": data.path,
        **{f"data.sources.{number}.path": source.path for number, source in enumerate(data.sources)},
        "memory.swap": config.memory.swap,
    }
    for name, path in needed.items():
        if path is not None and path.resolve().is_relative_to(folder.resolve()):
            problem = f"is in {folder}, which --fresh would move aside"
            raise ConfigError(setting(name, path, problem, "give the run another name, or move it out of there"))


def _not_written(config: Config, folder: Path, error: OSError) -> ConfigError:
    problem = f"{folder} cannot be written: {error.strerror}"
    return ConfigError(setting("run.folder", config.run.folder, problem, "name a folder that can"))
