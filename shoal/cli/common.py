"""What the commands share: options, the console, and how a run file and a layout are read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from shoal import config as configuration
from shoal.config import Config
from shoal.layout import Layout
from shoal.report.progress import progress
from shoal.report.to_try import to_try

if TYPE_CHECKING:
    from shoal.train.asked import Asked
    from shoal.train.metrics import Sink

console = Console(highlight=False, soft_wrap=True, emoji=False)
progress_bar = partial(progress, console)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="the run file")]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        help="how the work is spread, such as dp=2,mb=4; replaces the file's layout, but its dtype only by another",
    ),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="change a setting; may be repeated")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON for scripts")]


def read(run: Path, layout: str | None, overrides: Sequence[str] | None) -> tuple[Config, Layout]:
    """The run file, and the layout: the file's, or the one given, which keeps the file's dtype unless it names one."""
    config = configuration.load(run, overrides or ())
    if any(
        not text.startswith(("run.name", "run.folder")) for text in (*(overrides or ()), *([layout] if layout else []))
    ):
        # What the file promises, it promises of itself as it stands.
        promises = {"expected_loss": None, "expected_minutes": None}
        config = config.model_copy(update={"run": config.run.model_copy(update=promises)})
    if layout is None:
        return config, config.plan()
    plan = Layout.parse(layout)
    if "dtype" in config.layout and "dtype" not in layout:
        plan = Layout.parse(f"{layout},dtype={config.layout['dtype']}")
    return config.model_copy(update={"layout": plan.table()}), plan


def fewest(plan: Layout) -> int:
    """The ranks a layout has; one replica where it leaves their number open."""
    return replace(plan, dp=1).ranks if plan.dp == -1 else plan.ranks


@contextmanager
def ready(config: Config, layout: Layout, asked: Asked, json: bool) -> Iterator[None]:
    """Check what the run needs, before anything is written, and hold its folder."""
    from shoal.train.folder import occupy
    from shoal.train.prepare import prepare

    announce(config, json)
    with progress_bar(quiet=json) as progress:
        prepare(config, layout, progress, asked)
    with occupy(config):
        yield


def announce(config: Config, json: bool) -> None:
    """Say that a token store will be made, and from what: a path that was mistyped shows here."""
    data = config.data
    if data.source == "tokens" and data.path and data.text and not data.path.exists() and not json:
        console.print(f"making {escape(str(data.path))}, which is missing, from {escape(str(data.text))}")


def watch(config: Config, json: bool) -> Sequence[Sink]:
    """What the first rank shows, besides the files it writes."""
    from shoal.report.console import ConsoleSink
    from shoal.train.metrics import JsonLines

    return [JsonLines(sys.stdout, only=("step",))] if json else [ConsoleSink(config)]


def tell_next(steps: Iterable[tuple[str, str]]) -> None:
    """Print what to try next, if there is anything: (what for, command) of each."""
    if words := to_try(steps):
        console.print(words)


@contextmanager
def nothing() -> Iterator[Any]:
    yield None
