"""How the ranks of one machine find each other's memory and pipes.

Each makes a folder with an arena and a pipe from each other rank, says where it is, and opens what the others have made
for it. Then the folder goes: what is open needs no name, and however a process ends from then on, it leaves nothing
behind. What was left by one that ended before that, the next one removes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from shoal.comm.backends.arena import ALIGNMENT, Arena, mapped
from shoal.comm.backends.neighbour import Neighbour, Token, found
from shoal.comm.backends.regions import Regions

FOLDER = Path("/dev/shm")
LARGEST, SMALLEST = 256 << 20, 4 << 20
"""Bytes of an arena: of that which is there for all ranks of the machine, each takes its share of a half."""
_PREFIX, _ARENA, _MAKING = "shoal-", "arena", "making"
_JOINED_S = 600.0
"""A folder without an arena is being made, unless it is as old as that."""


class Link(NamedTuple):
    """To another rank: its arena, the pipe from it and the one to it; and its memory, where every rank's can be read by
    every other."""

    arena: np.ndarray
    source: int
    to: int
    memory: Neighbour | None = None


@dataclass
class _Made:
    """What is open, and the folder in which others find it, until they have."""

    folder: Path | None = None
    descriptors: list[int] = field(default_factory=list)

    def add(self, path: Path, flags: int) -> int:
        self.descriptors.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
        return self.descriptors[-1]

    def hide(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def meet(
    rank: int, ranks: Sequence[int], store: dist.Store, at_once: int, regions: Regions
) -> tuple[Arena, dict[int, Link]] | None:
    """This rank's arena, which has the memory that is needed ``at_once``, and its links to the other ``ranks``. None
    for all of them, where the system does not have what it takes for one."""
    made, token = _Made(), _token(regions)
    try:
        offered = _offer(made, rank, ranks, at_once)
        store.set(f"arena/{rank}", "" if offered is None else f"{token.text if token else ''}\n{made.folder}")
        named = store.multi_get([f"arena/{one}" for one in ranks])
        others = {one: tuple(name.decode().split("\n")) for one, name in zip(ranks, named, strict=True) if name}
        folders = {one: Path(folder) for one, (_, folder) in others.items()}
        links = _accept(made, rank, folders, offered[1]) if offered and len(folders) == len(ranks) else None
        if links is None:
            store.add("arenas/failed", 1)
        else:
            links = {one: link._replace(memory=_memory(one, others[one][0])) for one, link in links.items()}
            if not all(link.memory for link in links.values()):
                store.add("memory/hidden", 1)
        if store.add("arenas/opened", 1) == len(ranks):
            store.set("arenas/all", "1")
        store.wait(["arenas/all"])
        if offered is None or links is None or store.add("arenas/failed", 0):
            made.close()
            return None
        if store.add("memory/hidden", 0):
            links = {one: link._replace(memory=None) for one, link in links.items()}
        return offered[0], links
    except BaseException:
        made.close()
        raise
    finally:
        made.hide()


def _offer(made: _Made, rank: int, ranks: Sequence[int], at_once: int) -> tuple[Arena, dict[int, int]] | None:
    """A place for an arena and a pipe from each other rank, open."""
    try:
        _sweep()
        made.folder = folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=FOLDER))
        room = os.statvfs(folder)
        size = min(LARGEST, room.f_bavail * room.f_frsize // 2 // len(ranks)) // ALIGNMENT * ALIGNMENT
        if size < SMALLEST:
            return None
        descriptor = made.add(folder / _MAKING, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(folder / _MAKING, folder / _ARENA)  # nobody sees one without a lock that is in use
        sources = {}
        for other in ranks:
            if other != rank:
                os.mkfifo(folder / f"from-{other}", 0o600)
                sources[other] = made.add(folder / f"from-{other}", os.O_RDONLY | os.O_NONBLOCK)
        return Arena(descriptor, size, at_once), sources
    except OSError:
        return None


def _accept(made: _Made, rank: int, folders: dict[int, Path], sources: dict[int, int]) -> dict[int, Link] | None:
    """Open what the others have made for this rank."""
    links = {}
    try:
        for other, source in sources.items():
            to = made.add(folders[other] / f"from-{rank}", os.O_WRONLY | os.O_NONBLOCK)
            arena = os.open(folders[other] / _ARENA, os.O_RDWR | os.O_CLOEXEC)
            links[other] = Link(mapped(arena, os.fstat(arena).st_size), source, to)
            os.close(arena)
    except OSError:
        return None
    return links


def _token(regions: Regions) -> Token | None:
    try:
        return Token(regions)
    except OSError:
        return None


def _memory(rank: int, token: str) -> Neighbour | None:
    return found(rank, token) if token else None


def _sweep() -> None:
    """Remove folders of processes that have ended before others had opened what was in them: nobody has a lock."""
    for folder in FOLDER.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            try:
                descriptor = os.open(folder / _ARENA, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                if time.time() - folder.stat().st_mtime > _JOINED_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
