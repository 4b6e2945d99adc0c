"""A C++ file of Shoal's, built for this machine when it is first used.

PyTorch's builder does it, which needs a compiler and ninja. What it makes is kept in PyTorch's folder of extensions,
under a name of everything that went into it: the source, the flags, PyTorch, the compiler and what the processor can
do, for a home folder may be shared by machines that differ.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import CDLL
from pathlib import Path

import torch

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fopenmp")


class NotBuilt(Exception):
    """There is no library; the text says why. ``tried`` when there was a compiler to build it."""

    def __init__(self, why: str, tried: bool) -> None:
        super().__init__(why)
        self.tried = tried


def library(source: Path) -> CDLL:
    """What ``source`` is built into. Its functions are called without the interpreter's lock, and OpenMP's threads in
    it are PyTorch's. Processes that ask at the same time wait for one of them to build it. Raises :class:`NotBuilt`."""
    try:
        from torch.utils import cpp_extension
    except ImportError as error:  # it asks for setuptools
        raise NotBuilt(str(error), tried=False) from error

    compiler = cpp_extension.get_cxx_compiler()
    missing = [program for program in (compiler.split()[0], "ninja") if shutil.which(program) is None]
    if missing:
        raise NotBuilt(f"there is no {' and no '.join(missing)} on the PATH", tried=False)
    try:
        version = subprocess.run([*compiler.split(), "--version"], capture_output=True, check=True).stdout.decode()
        what = (source.read_text(), *FLAGS, torch.__version__, version, _processor())
        key = hashlib.sha256("\0".join(what).encode()).hexdigest()[:16]
        folder = Path(cpp_extension.get_default_build_root())
        built = folder / f"shoal_{source.stem}_{key}.so"
        if not built.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with open(built.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not built.exists():
                    _build(source, built)
        return CDLL(str(built))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        raise NotBuilt(f"building {source.name} with {compiler} failed: {error}", tried=True) from error


def _build(source: Path, built: Path) -> None:
    """In a folder of its own, from which the result is moved: a build that is killed leaves nothing that looks like
    one, and no lock of the builder's, for which others would wait for ever."""
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=built.parent) as place:
        cpp_extension.load(
            built.stem,  # the builder numbers what comes under one name
            str(source),
            extra_cflags=[*FLAGS],
            extra_ldflags=["-fopenmp"],
            build_directory=place,
            with_cuda=False,
            is_python_module=False,
        )
        os.replace(Path(place) / built.name, built)


def _processor() -> str:
    """What ``-march=native`` depends on."""
    with open("/proc/cpuinfo") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
