"""Where the numbers of a run go: a JSON-lines file always, TensorBoard and Weights & Biases if asked.

A sink takes events: "start", "step", "skipped", "dropped", "evaluation", "checkpoint", "sample", "trace", "end", each
with its values. Only the first rank has sinks. A tracker that fails is dropped with a warning: it must never stop a
run.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, TextIO

from shoal.config import Config
from shoal.errors import ConfigError, setting

Values = Mapping[str, Any]


class Sink(Protocol):
    """Takes what happens in a run."""

    def record(self, event: str, values: Values) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line: the event's name under "event", then its values. With ``only``, just those events."""

    def __init__(self, file: TextIO, only: Sequence[str] = ()) -> None:
        self._file, self._only = file, only

    def record(self, event: str, values: Values) -> None:
        if not self._only or event in self._only:
            self._file.write(json_line({"event": event, **values}) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not sys.stdout:
            self._file.close()


class TensorBoard:
    """Scalars of steps and evaluations in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def record(self, event: str, values: Values) -> None:
        if event in ("step", "evaluation"):
            for name, value in _scalars(values).items():
                self._writer.add_scalar(f"{event}/{name}", value, values["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Scalars of steps and evaluations in the project ``log.project``, under the run's name."""

    def __init__(self, config: Config, folder: Path) -> None:
        settings = config.model_dump(mode="json")
        self._run: Any = import_module("wandb").init(
            project=config.log.project, name=config.run.name, dir=str(folder), config=settings
        )

    def record(self, event: str, values: Values) -> None:
        if event in ("step", "evaluation"):
            self._run.log({f"{event}/{name}": value for name, value in _scalars(values).items()}, step=values["step"])

    def close(self) -> None:
        self._run.finish()


class Tolerant:
    """A tracker that may fail, from its making on: the first failure is logged and ends it."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name = name
        self._sink: Sink | None = None
        with self._failing():
            self._sink = make()

    def record(self, event: str, values: Values) -> None:
        if self._sink is not None:
            with self._failing():
                self._sink.record(event, values)

    def close(self) -> None:
        if self._sink is not None:
            with self._failing():
                self._sink.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a tracker raises, training goes on
            logging.getLogger("shoal").warning("%s failed and gets no more metrics: %s", self._name, error)
            self._sink = None


def check_packages(config: Config) -> None:
    """Raise :class:`ConfigError` where the run file asks for a tracker whose package is not installed."""
    for package in ("tensorboard", "wandb"):
        if getattr(config.log, package) and find_spec(package) is None:
            legal = f"install it with pip install 'shoal[{package}]', or set log.{package} = false"
            raise ConfigError(setting(f"log.{package}", "true", f"the package {package} is not installed", legal))


def open_sinks(config: Config, folder: Path) -> list[Sink]:
    """The sinks that a run file asks for."""
    sinks: list[Sink] = [JsonLines(_append(folder / "metrics.jsonl"))]
    if config.log.tensorboard:
        sinks.append(Tolerant("TensorBoard", lambda: TensorBoard(folder / "tensorboard")))
    if config.log.wandb:
        sinks.append(Tolerant("Weights & Biases", lambda: WeightsAndBiases(config, folder)))
    return sinks


def _append(path: Path) -> TextIO:
    """Open ``path`` to append lines; a last line that was cut off gets an end of its own."""
    file = path.open("a+b")
    if file.tell() and (file.seek(-1, 2), file.read(1))[1] != b"\n":
        file.write(b"\n")
    file.close()
    return path.open("a", encoding="utf-8")


def json_line(values: Values) -> str:
    """One line of strict JSON: a number that is not finite becomes null."""
    return json.dumps(
        {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in values.items()}
    )


def _scalars(values: Values) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}
