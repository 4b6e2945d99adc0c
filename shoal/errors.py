"""What a user can cause, as exceptions whose text says what to change.

Every message names the setting at fault, its value and a legal one. What only Shoal itself can cause is an
``assert`` where it happens, not an exception here.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ShoalError(Exception):
    """Base of every error a user can cause. ``str(error)`` is the whole message; commands exit with ``exit_code``."""

    exit_code = 2


class ConfigError(ShoalError):
    """A run file, a ``--set`` or a command-line value that cannot be used."""


class LayoutError(ShoalError):
    """A layout that is malformed, not built yet, or does not fit the model, the batch or the world."""


class DataError(ShoalError):
    """A text, tokenizer or token store that is missing, damaged or does not match the model."""


class CheckpointError(ShoalError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class RankFailed(ShoalError):
    """A rank raised or was killed; the text carries its traceback or signal."""

    exit_code = 1


class Diverged(ShoalError):
    """Gradients of step number ``step``, counted from 1, are not finite: training cannot go on from here. Where its
    micro-batches are updates of their own, those of ``micro_batches`` are not."""

    exit_code = 1

    def __init__(self, message: str, step: int, micro_batches: tuple[int, ...] = ()) -> None:
        super().__init__(message, step, micro_batches)
        self.step, self.micro_batches = step, micro_batches

    def __str__(self) -> str:
        return str(self.args[0])


class Stopped(ShoalError):
    """A run that was ended from outside: by a signal, or because nobody reads its output any more."""

    exit_code = 1


def setting(name: str, value: object, problem: str, legal: str) -> str:
    """One line of the form every message takes: the setting, its value, what is wrong, what would be right."""
    return f"{name} = {value}: {problem}; {legal}"


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known name closest to ``word``, or nothing when none is close."""
    matches = get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
