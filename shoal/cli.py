"""The commands. Each says what it will do, shows progress, and ends with what to do next."""

from __future__ import annotations

import json as jsonlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from shoal import config as configuration
from shoal.config import Config
from shoal.errors import ConfigError, ShoalError, setting
from shoal.layout import Layout

if TYPE_CHECKING:
    from shoal.train.metrics import Sink

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train language models under any parallel layout, and prove that it computes what one device would.",
)
console = Console(highlight=False, soft_wrap=True)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="the run file")]
LayoutOption = Annotated[
    str | None, typer.Option("--layout", help="how the work is spread, such as dp=2,mb=4; replaces the file's layout")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="change a setting; may be repeated")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON for scripts")]


@app.command()
def train(
    run: RunFile,
    layout: LayoutOption = None,
    set_: SetOption = None,
    processes: Annotated[
        int | None, typer.Option("-n", help="local processes to start; default: as many as the layout has ranks", min=1)
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="start at step 0; an earlier run is moved aside")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="print every setting and stop")] = False,
    json: JsonOption = False,
) -> None:
    """Train the model of a run file, from its newest checkpoint if there is one.

    Starts local processes, or joins the ranks that torchrun or Slurm has started.

    Example: shoal train runs/quickstart.toml --layout dp=2 --set run.steps=50
    """
    config, plan = _read(run, layout, set_)
    if print_config:
        typer.echo(configuration.toml(config), nl=False)
        return
    from shoal.train.setup import fit

    joined = _launched()
    ranks = joined or processes or (1 if plan.dp == -1 else plan.ranks)
    plan = fit(config, plan, ranks)
    watch = partial(_watch, config, json)
    if joined:
        _train_joined(config, plan, watch, fresh)
        return
    from shoal.train.loop import train as loop
    from shoal.train.pool import Pool
    from shoal.train.prepare import prepare, start_afresh

    with _progress(quiet=json) as progress:
        prepare(config, progress)
    if fresh and (aside := start_afresh(config)) is not None and not json:
        console.print(f"the earlier run is now {escape(str(aside))}")
    threads = max(1, (os.cpu_count() or 1) // ranks)
    with Pool(ranks, threads=threads) as pool:
        pool.run(loop, config, plan, watch, timeout_s=config.run.timeout, device=config.run.device)


@app.command()
def verify(
    run: RunFile,
    layout: LayoutOption = None,
    set_: SetOption = None,
    steps: Annotated[int, typer.Option(help="optimizer steps to compare", min=1)] = 5,
    json: JsonOption = False,
) -> None:
    """Run a layout beside one process and compare loss, gradient norm, gradients and weights, per parameter.

    Exits with 1 when they disagree.

    Example: shoal verify runs/tiny.toml --layout dp=4,mb=2
    """
    config, plan = _read(run, layout, set_)
    from shoal.train.pool import Pool
    from shoal.train.prepare import prepare
    from shoal.train.setup import fit
    from shoal.train.verify import verify as compare

    plan = fit(config, plan, 1 if plan.dp == -1 else plan.ranks)
    with _progress(quiet=json) as progress:
        prepare(config, progress)
    if not json:
        console.print(f"[bold]{plan}[/] beside one process: {steps} steps, labels masked unequally, {plan.dtype}")
    with Pool(plan.ranks) as pool, console.status("running") if not json else _nothing():
        report = compare(config, plan, pool, steps)
    if json:
        typer.echo(jsonlib.dumps(report.as_json()))
    else:
        from shoal.report.parity import parity_table

        console.print(parity_table(report))
    raise typer.Exit(0 if report.agree else 1)


@app.command()
def data(
    text: Annotated[Path, typer.Argument(help="a .txt or .jsonl file, or a folder of them")],
    out: Annotated[Path, typer.Argument(help="the token store to write, a new folder")],
    tokenizer: Annotated[Path | None, typer.Option(help="a tokenizer.json to use")] = None,
    train_vocab: Annotated[
        int | None, typer.Option(help="or: train a byte-level BPE of this many entries on the text", min=257)
    ] = None,
    separator: Annotated[str | None, typer.Option(help="what stands between documents of a text file")] = None,
    field: Annotated[str, typer.Option(help="the field of a JSONL object that holds the text")] = "text",
    workers: Annotated[int | None, typer.Option(help="processes; default: one a CPU", min=1)] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a store that is there")] = False,
) -> None:
    """Tokenise text or JSONL into a memory-mapped token store.

    Example: shoal data data/kjv.txt data/kjv.store --train-vocab 2048 --separator $'\\n\\n\\n'
    """
    if (tokenizer is None) == (train_vocab is None):
        raise ConfigError("shoal data: give either --tokenizer tokenizer.json or --train-vocab N, such as 2048")
    from shoal.train.prepare import make_store

    with _progress() as progress:
        store = make_store(
            text,
            out,
            tokenizer=tokenizer,
            vocab=train_vocab,
            separator=separator,
            field=field,
            workers=workers,
            overwrite=overwrite,
            progress=progress,
        )
    console.print(
        f"[bold]{out}[/]: {len(store):,} tokens in {len(store.documents) - 1:,} documents, vocabulary {store.vocab:,}\n"
        f'next: set path = "{out}" under \\[data] in a run file, with model.vocab at least {store.vocab}, '
        "and shoal train it"
    )


@app.command(name="generate")
def generate_text(
    checkpoint: Annotated[Path, typer.Argument(help="a run's folder, or one of its checkpoints")],
    prompt: Annotated[str, typer.Option(help="how the text begins")],
    tokens: Annotated[int, typer.Option(help="tokens to draw at most", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token", min=0.0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="draw from so many likeliest tokens; 0: all", min=0)] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: JsonOption = False,
) -> None:
    """Continue a text with a trained model.

    Example: shoal generate out/quickstart --prompt "And it came to pass"
    """
    from shoal.train.speak import speak

    words = speak(checkpoint, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    if json:
        typer.echo(jsonlib.dumps({"prompt": prompt, "text": "".join(words)}))
        return
    typer.echo(prompt, nl=False)
    for word in words:
        typer.echo(word, nl=False)
    typer.echo()


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="a token store, a run's folder, or a checkpoint")],
    verify: Annotated[bool, typer.Option(help="read everything and compare checksums")] = False,
    json: JsonOption = False,
) -> None:
    """Show what a token store or a checkpoint holds.

    Example: shoal inspect out/quickstart --verify
    """
    from shoal.report.contents import contents

    with _progress(quiet=json) as progress:
        found = contents(path, partial(progress, f"reading {path}") if verify else None)
    if json:
        typer.echo(jsonlib.dumps(found.as_json()))
    else:
        console.print(found.table())


def main() -> None:
    """The entry point: a user's error is one message and a non-zero exit code, not a traceback."""
    try:
        app()
    except ShoalError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(error.exit_code)


def _read(run: Path, layout: str | None, overrides: Sequence[str] | None) -> tuple[Config, Layout]:
    """The run file, and the layout: the file's, or the one given, which keeps the file's dtype unless it names one."""
    config = configuration.load(run, overrides or ())
    if layout is None:
        return config, config.plan()
    plan = Layout.parse(layout)
    if "dtype" in config.layout and "dtype" not in layout:
        plan = Layout.parse(f"{layout},dtype={config.layout['dtype']}")
    return config, plan


def _launched() -> int | None:
    """How many ranks a launcher has started, this process among them; None where there is no launcher."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and size in os.environ:
            try:
                return int(os.environ[size])
            except ValueError:
                raise ConfigError(setting(size, os.environ[size], "not a whole number", "check the launcher")) from None
    return None


def _train_joined(config: Config, plan: Layout, watch: Callable[[], Sequence[Sink]], fresh: bool) -> None:
    """This process's part of a run whose ranks a launcher has started."""
    from shoal.comm.collectives import barrier
    from shoal.comm.world import init
    from shoal.train.loop import train as loop
    from shoal.train.prepare import prepare, start_afresh

    with init(device=config.run.device, timeout_s=config.run.timeout) as world:
        if world.rank == 0:
            with _progress() as progress:
                prepare(config, progress)
            if fresh:
                start_afresh(config)
        barrier(world.everyone)
        loop(world, config, plan, watch)


def _watch(config: Config, json: bool) -> Sequence[Sink]:
    """What the first rank shows, besides the files it writes."""
    from shoal.report.console import ConsoleSink
    from shoal.train.metrics import JsonLines

    return [JsonLines(sys.stdout, only=("step",))] if json else [ConsoleSink(config)]


@contextmanager
def _progress(quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for work measured in bytes, where a person is watching."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield show


@contextmanager
def _nothing() -> Iterator[Any]:
    yield None


__all__ = ["Table", "app", "main"]
