"""The life of checkpoint folders: prepared aside, published by rename, pointed to, found again, discarded.

In a run's folder::

    step-00000010/                  a finished checkpoint
    step-00000010.old/              the one it replaces, until ``latest`` has moved
    step-00000020.tmp-5f0c2a91/     one being written or deleted
    latest                          the name of the newest

Whatever happens at any moment, ``latest`` leads to a whole checkpoint, and what a dead process left is put right by
the next save. Nothing depends on the time of a file.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from shoal.checkpoint.manifest import MANIFEST, read_manifest
from shoal.errors import CheckpointError, setting

LATEST = "latest"
_STEP = re.compile(r"step-\d{8,}")
_TEMPORARY = re.compile(r"(step-\d{8,}(\.old)?|latest)\.tmp-[0-9a-f]+")
_OLD = ".old"


def step_folder(folder: Path, step: int) -> Path:
    """Where the finished checkpoint of ``step`` lies."""
    return folder / f"step-{step:08d}"


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run's ``folder``, or None.

    It is the one that the pointer names, whatever state it is in: to load it then tells what is damaged, where going
    back in silence would lose steps. Only when the pointer is missing, unreadable or names no folder is it the
    complete checkpoint of the highest step.
    """
    with suppress(OSError, UnicodeDecodeError):
        name = (folder / LATEST).read_text("ascii").strip()
        if _STEP.fullmatch(name):
            for path in (folder / name, folder / (name + _OLD)):
                if path.is_dir():
                    return path
    return next((path for path in _by_step(folder) if _complete(path)), None)


def resolve(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or, for a run's folder, its latest.

    Raises :class:`CheckpointError` when there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    if (found := latest(path)) is not None:
        return found
    raise CheckpointError(
        setting("checkpoint", path, "no checkpoint is there", f"name a folder with {MANIFEST}, or a run's folder")
    )


def prepare(folder: Path, step: int) -> Path:
    """A new empty folder in which to write the checkpoint of ``step``, after clearing what dead saves left."""
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    tidy(folder)
    aside = _aside(step_folder(folder, step))
    aside.mkdir()
    return aside


def publish(aside: Path, final: Path) -> None:
    """Make the finished folder ``aside`` the checkpoint ``final`` and the latest one.

    The pointer's new text is on disk before the first rename, so that a full disk stops the save while all is as it
    was. A checkpoint already at ``final`` stays beside it, where :func:`latest` finds it, until the pointer has moved.
    """
    folder, old = final.parent, final.with_name(final.name + _OLD)
    sync_folder(aside)
    draft = _aside(folder / LATEST)
    write_synced(draft, final.name + "\n")
    if final.exists():
        os.rename(final, old)
    os.rename(aside, final)
    sync_folder(folder)
    os.replace(draft, folder / LATEST)
    sync_folder(folder)
    if old.exists():
        _discard(old)


def retain(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` checkpoints of the highest steps and the latest one."""
    current = latest(folder)
    finished = [path for path in _by_step(folder) if _STEP.fullmatch(path.name)]
    for path in finished[keep:]:
        if path != current:
            _discard(path)


def tidy(folder: Path) -> None:
    """Put right what a save that died or failed left in ``folder``."""
    for path in list(folder.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            _discard(path)
        elif path.name.endswith(_OLD) and _STEP.fullmatch(path.name.removesuffix(_OLD)):
            final = path.with_name(path.name.removesuffix(_OLD))
            if final.exists():
                _discard(path)
            else:
                os.rename(path, final)


def write_synced(path: Path, text: str) -> None:
    """Write a new small file and force it to disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force the entries of ``folder`` to disk: a rename is not safe from power loss before that."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _by_step(folder: Path) -> list[Path]:
    """Finished checkpoints and those set aside, the highest step first."""
    found = []
    with suppress(OSError):
        for path in folder.iterdir():
            name = path.name.removesuffix(_OLD)
            if _STEP.fullmatch(name) and (path / MANIFEST).is_file():  # what somebody else put here is not ours
                found.append((int(name.removeprefix("step-")), path.name == name, path))
    return [path for *_, path in sorted(found, reverse=True)]


def _complete(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def _discard(path: Path) -> None:
    """Delete, under a name that no reader takes for a checkpoint. What cannot be deleted waits for the next save."""
    with suppress(OSError):
        if not _TEMPORARY.fullmatch(path.name):
            path = path.rename(_aside(path))
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
