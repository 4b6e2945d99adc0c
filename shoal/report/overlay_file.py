"""The trace of a run, found and read; whoever asks for what is none is told which command writes one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from shoal.config import load
from shoal.errors import ConfigError, ShoalError, setting
from shoal.pipeline.trace_file import TRACE, Trace, from_chrome, steps_traced

_NAME = "RUN"
_HEAD = 100_000
"""Letters, before which a trace comes to its events."""


def trace_path(asked: Path) -> Path:
    """The file, where ``asked`` is it or the folder of a run. Raises :class:`~shoal.errors.ConfigError` for neither."""
    path = asked / TRACE if asked.is_dir() else asked
    if not path.is_file():
        problem = f"has no {TRACE}" if asked.is_dir() else "is neither the folder of a run nor a trace"
        raise ConfigError(setting(_NAME, asked, problem, f"{_how(asked)} writes one"))
    return path


def read_trace(path: Path) -> Trace:
    """Raises :class:`~shoal.errors.ConfigError` for a file that cannot be read, is cut short, or is no such trace."""
    how = f"write it anew with {_how(path.parent)}"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(setting(_NAME, path, f"cannot be read: {error.strerror}", how)) from None
    except UnicodeDecodeError:
        raise ConfigError(setting(_NAME, path, "is no trace: it is not text", how)) from None
    try:
        return from_chrome(json.loads(text))
    except json.JSONDecodeError:
        problem = "is cut short or damaged" if '"traceEvents"' in text[:_HEAD] else "is no trace: it is not JSON"
    except ValueError as error:
        problem = f"is no trace of shoal train: {error}"
    raise ConfigError(setting(_NAME, path, problem, how))


def _how(folder: Path) -> str:
    """The command that writes the trace of a few steps, and leaves what the run has saved alone."""
    run = folder / "run.toml"
    try:
        config = load(run)
        layout = config.plan()
    except ShoalError:
        return "shoal train RUN.toml --trace"
    drains = {"evaluation": config.evaluation.every, "checkpoint": config.checkpoint.every}
    settings = [
        f"run.name={folder.resolve().name}-traced",
        f"run.stop={steps_traced(layout).stop}",
        *(f"{section}.every=0" for section, every in drains.items() if every and layout.asynchronous),
    ]
    words = " ".join(f"--set {shlex.quote(one)}" for one in settings)
    return f"shoal train {shlex.quote(str(run))} {words} --trace --fresh"
