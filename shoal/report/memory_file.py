"""The memory of a run's step, found and read; whoever asks for what is none is told which command writes one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from shoal.errors import ConfigError, setting
from shoal.memory.account import MEMORY, Memory, read

_NAME = "RUN"


def memory_path(asked: Path) -> Path:
    """The file, where ``asked`` is it or the folder of a run. Raises :class:`~shoal.errors.ConfigError` for neither."""
    path = asked / MEMORY if asked.is_dir() else asked
    if not path.is_file():
        problem = f"has no {MEMORY}" if asked.is_dir() else f"is neither the folder of a run nor a {MEMORY}"
        raise ConfigError(setting(_NAME, asked, problem, f"{_how(asked)} writes one"))
    return path


def read_memory(path: Path) -> Memory:
    """Raises :class:`~shoal.errors.ConfigError` for a file that cannot be read, or is none of ``--memory``."""
    how = f"write it anew with {_how(path.parent)}"
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        problem = "is not text"
    except json.JSONDecodeError:
        problem = "is cut short or damaged: it is not JSON"
    except ValueError as error:
        problem = f"is no memory of shoal train: {error}"
    raise ConfigError(setting(_NAME, path, problem, how))


def _how(folder: Path) -> str:
    """The command that measures a step, and leaves what the run has saved alone."""
    run = folder / "run.toml"
    if not run.is_file():
        return "shoal train RUN.toml --memory"
    name = shlex.quote(f"run.name={folder.resolve().name}-measured")
    return f"shoal train {shlex.quote(str(run))} --set {name} --set run.stop=3 --memory"
