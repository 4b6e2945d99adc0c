"""The commands. Each says what it will do, shows progress, and ends with what to do next."""

from __future__ import annotations

import os
import sys
import time

import typer
from rich.console import Console
from rich.markup import escape

from shoal.cli.calibrate import calibrate
from shoal.cli.data import inspect_data, make_data
from shoal.cli.dryrun import dryrun
from shoal.cli.models import export_folder, generate_text, import_folder, inspect
from shoal.cli.pipelines import show_schedule
from shoal.cli.plan import plan
from shoal.cli.refusals import NamesValues
from shoal.cli.reports import report
from shoal.cli.train import show_layout, train, verify
from shoal.errors import DataError, ShoalError
from shoal.report.default_command import MakeByDefault

app = typer.Typer(
    cls=NamesValues,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train language models under any parallel layout, and prove that it computes what one device would.\n\n"
    "Example: shoal train runs/quickstart.toml",
)
data = typer.Typer(cls=MakeByDefault, no_args_is_help=True)
data.command(name="make")(make_data)
data.command(name="inspect")(inspect_data)
app.command()(train)
app.command()(verify)
app.command(name="layout")(show_layout)
app.command(name="schedule")(show_schedule)
app.command()(plan)
app.command()(calibrate)
app.command()(dryrun)
app.command()(report)
app.add_typer(
    data,
    name="data",
    help="Make token stores, and look at them; all with --json.\n\n"
    "Example: shoal data data/kjv.txt data/kjv.store --train-vocab 2048",
)
app.command(name="generate")(generate_text)
app.command()(inspect)
app.command(name="import")(import_folder)
app.command(name="export")(export_folder)

# Ranks that a launcher has started mostly fail alike: the first tells, the others wait for the launcher to end them.
_FIRST_TELLS_S = 2.0


def main() -> None:
    """The entry point: a user's error is one message and a non-zero exit code, not a traceback."""
    try:
        app()
    except ShoalError as error:
        _tell(error)
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads what is left: let the interpreter not complain of it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(error.exit_code)


def _tell(error: ShoalError) -> None:
    """Print the error once, however many ranks a launcher has started."""
    text = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    rank = int(text) if text.isdigit() else 0
    if rank and not isinstance(error, DataError):  # that alone may be true of one host, while the others are at work
        time.sleep(_FIRST_TELLS_S)
    lines = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if rank:
        lines = f"rank {rank}: {lines}"
    Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(f"[bold red]error:[/] {escape(lines)}")


__all__ = ["app", "main"]
