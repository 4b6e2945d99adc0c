"""The load of a run's experts over its steps: what each was given over an even share, read from its metrics."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.style import Style

from shoal.errors import ConfigError, setting
from shoal.report.lanes import checked_path, write
from shoal.report.svg import MUTED, Canvas, oklch, text_width
from shoal.report.wording import counted

METRICS = "metrics.jsonl"
_HIGH = 2.0
"""The load from which on a colour is the darkest."""
_SHADES = " .:-=+*#%@"
"""Of cells without colours, from no load to :data:`_HIGH`."""
_LAST = 20
"""Steps over which what is told in words is a mean."""
_CELL, _WIDTH, _MARGIN, _GAP = 14, 640, 24, 18


@dataclass(frozen=True)
class ExpertLoads:
    """``loads`` of each layer: [step][expert], 1 where load is even. ``dropped`` is the share of tokens that experts
    dropped in the last steps."""

    steps: tuple[int, ...]
    loads: dict[str, list[list[float]]]
    dropped: float

    def cells(self, layer: str, columns: int) -> list[list[float]]:
        """[expert][column]: means over as many neighbouring steps as go into one of at most ``columns``."""
        rows = self.loads[layer]
        size = ceil(len(rows) / columns)
        parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        return [[sum(row[e] for row in part) / len(part) for part in parts] for e in range(len(rows[0]))]

    def largest(self, layer: str) -> float:
        """The load of the most loaded expert, on average over the last steps."""
        rows = self.loads[layer][-_LAST:]
        means: list[float] = [sum(one) / len(rows) for one in zip(*rows, strict=True)]
        return max(means)

    def as_json(self) -> dict[str, object]:
        return {
            "steps": list(self.steps),
            "load": self.loads,
            "largest": {layer: self.largest(layer) for layer in self.loads},
            "dropped": self.dropped,
        }

    @property
    def headline(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        most = max(map(self.largest, self.loads))
        return f"load of experts, steps {first} to {last}: in the last {self.last} at most {most:.2f} of an even share"

    @property
    def last(self) -> int:
        """How many steps are the last ones."""
        return min(_LAST, len(self.steps))

    def words(self, layer: str) -> str:
        return f"{layer}: the largest {self.largest(layer):.2f}, the mean of the last {counted(self.last, 'step')}"


def read_loads(run: Path) -> ExpertLoads:
    """Of the run whose folder, or metrics, ``run`` is. Raises :class:`~shoal.errors.ConfigError` where there are none.
    A step that was done twice counts as it was done last."""
    path = run / METRICS if run.is_dir() else run
    found: dict[int, tuple[dict[str, list[int]], float]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            if values.get("event") == "step" and "expert_tokens" in values:
                found[values["step"]] = values["expert_tokens"], values["dropped"]
    except (OSError, UnicodeDecodeError):
        raise ConfigError(setting("RUN", run, f"has no {METRICS} to read", "name the folder of a run")) from None
    except json.JSONDecodeError:
        raise ConfigError(setting("RUN", path, "has a line that is not JSON", "name the folder of a run")) from None
    if not found:
        problem, legal = "tells of no experts", "train a model with model.experts, such as runs/tiny-moe.toml"
        raise ConfigError(setting("RUN", run, problem, legal))
    steps = tuple(sorted(found))
    tokens = [found[step][0] for step in steps]
    loads = {layer: [_over_an_even_share(one[layer]) for one in tokens] for layer in tokens[0]}
    last = [found[step][1] for step in steps[-_LAST:]]
    return ExpertLoads(steps, loads, sum(last) / len(last))


def _over_an_even_share(tokens: list[int]) -> list[float]:
    return [count * len(tokens) / max(sum(tokens), 1) for count in tokens]


def load_report(seen: ExpertLoads) -> RenderableType:
    """Everything that ``shoal report --experts`` prints."""
    dropped = f"; in the last {seen.last} steps {seen.dropped:.1%} of the tokens dropped" if seen.dropped else ""
    shades = f"from nothing ({_SHADES[0]}) to {_HIGH:g} times an even share and more ({_SHADES[-1]}, or dark)"
    words = f"a row an expert, time to the right, {shades}{dropped}"
    return Group(f"[bold]{escape(seen.headline)}[/]", f"[dim]{escape(words)}[/]", "", Cells(seen))


class Cells:
    """A row an expert, as wide as there is room. Colours where there are some."""

    def __init__(self, seen: ExpertLoads) -> None:
        self._seen = seen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seen, plain = self._seen, console.color_system is None or console.no_color
        for layer in seen.loads:
            yield Segment(f"{seen.words(layer)}\n")
            for expert, row in enumerate(seen.cells(layer, max(options.max_width - 8, 8))):
                yield Segment(f"{expert:>5}  ", Style(dim=True))
                for load in row:
                    shade = _SHADES[min(int(load / _HIGH * len(_SHADES)), len(_SHADES) - 1)]
                    yield Segment(shade) if plain else Segment(" ", Style(bgcolor=_colour(load)))
                yield Segment.line()
            yield Segment.line()


def picture_path(asked: Path) -> Path:
    """``asked``. Raises :class:`~shoal.errors.ConfigError` for a name that is not that of a picture."""
    return checked_path(asked, "--out", "experts")


def write_picture(seen: ExpertLoads, path: Path) -> None:
    """Write the picture. Raises :class:`~shoal.errors.ConfigError` where ``path`` cannot be written."""
    write(loads_svg(seen), seen.headline, path, "--out")


def loads_svg(seen: ExpertLoads) -> str:
    """The picture as SVG: a field a layer, a row an expert, time to the right."""
    canvas, y = Canvas(), 42.0
    canvas.text(_MARGIN, y, seen.headline, 16, bold=True)
    y += 22
    meaning = f"from nothing (pale) over an even share to {_HIGH:g} of it and more (dark)"
    canvas.text(_MARGIN, y, meaning, 12, colour=MUTED)
    left = _MARGIN + 16 + text_width("000", 10)
    for layer in seen.loads:
        y += _GAP + 12
        canvas.text(_MARGIN, y, seen.words(layer), 12, bold=True)
        y += 8
        for expert, row in enumerate(seen.cells(layer, _WIDTH // 2)):
            canvas.text(left - 6, y + _CELL - 3, str(expert), 10, colour=MUTED, anchor="end")
            width = _WIDTH / len(row)
            for at, load in enumerate(row):
                canvas.rect(left + at * width, y, width, _CELL - 1, _colour(load))
            y += _CELL
    canvas.text(left, y + 14, f"step {seen.steps[0]}", 10, colour=MUTED)
    canvas.text(left + _WIDTH, y + 14, f"step {seen.steps[-1]}", 10, colour=MUTED, anchor="end")
    width = max(left + _WIDTH, _MARGIN + text_width(seen.headline, 16, bold=True)) + _MARGIN
    return canvas.document(width, y + 30, seen.headline)


def _colour(load: float) -> str:
    return oklch(0.97 - 0.62 * min(load, _HIGH) / _HIGH, 0.03 + 0.1 * min(load, _HIGH) / _HIGH, 255)
