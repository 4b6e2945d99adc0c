"""Whether a folder is on a disk."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from shoal.errors import setting

IN_MEMORY = ("tmpfs", "ramfs")
"""Filesystems without one."""


@cache
def warn_of_memory(folder: Path) -> None:
    """Warn, once, of a ``folder`` for what memory has no room for, if it is in memory."""
    if (kind := _filesystem(folder)) in IN_MEMORY:
        problem = f"is a {kind}, which takes what it holds from the memory that was to be spared"
        legal = "name a folder on a disk of this machine"
        logging.getLogger("shoal").warning("warning: %s", setting("memory.swap", folder, problem, legal))


def _filesystem(folder: Path) -> str:
    """What kind of filesystem ``folder`` is on; nothing where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    place = folder.resolve()
    within = [(len(words[1]), words[2]) for words in mounts if place.is_relative_to(words[1])]
    return max(within, default=(0, ""))[1]
