"""Folders for as long as a process is at work, also those of processes that were killed and removed nothing."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_YOUNG_S = 60.0
"""One that is younger may be about to be locked."""


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A new folder, locked by this process until the block ends, and then gone. Others for the ``purpose`` that nobody
    has locked any more are removed first."""
    prefix = f"shoal-{purpose}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_if_left(left)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        lock = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a filesystem without locks, where nothing can be found to be left either
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(folder)
        finally:
            os.close(lock)


def _remove_if_left(folder: Path) -> None:
    """A lock is held wherever its process runs: in another container, too, whose processes cannot be seen here."""
    with suppress(OSError):  # somebody else's, or gone meanwhile
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - folder.stat().st_mtime > _YOUNG_S:
                shutil.rmtree(folder)
        finally:
            os.close(lock)
