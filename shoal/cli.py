"""The commands. Each says what it will do, shows progress, and ends with what to do next."""

from __future__ import annotations

import json as jsonlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
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
from shoal.errors import ConfigError, DataError, LayoutError, ShoalError, setting
from shoal.layout import Layout
from shoal.report.default_command import MakeByDefault
from shoal.report.progress import progress as progress_bar

if TYPE_CHECKING:
    from shoal.train.metrics import Sink

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train language models under any parallel layout, and prove that it computes what one device would.\n\n"
    "Example: shoal train runs/quickstart.toml",
)
data = typer.Typer(cls=MakeByDefault, no_args_is_help=True)
app.add_typer(
    data,
    name="data",
    help="Make token stores, and look at them; all with --json.\n\n"
    "Example: shoal data data/kjv.txt data/kjv.store --train-vocab 2048",
)
# Ranks that a launcher has started mostly fail alike: the first tells, the others wait for the launcher to end them.
_FIRST_TELLS_S = 2.0
console = Console(highlight=False, soft_wrap=True)
_progress = partial(progress_bar, console)

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
    from shoal.train.launch import launched, train_here, train_joined
    from shoal.train.setup import fit

    joined = launched()
    if joined and processes not in (None, joined):
        problem = f"the launcher has started {joined}"
        raise ConfigError(setting("-n", processes, problem, f"leave it out, or use -n {joined}"))
    plan = fit(config, plan, joined or processes or _fewest(plan))
    begin = train_joined if joined else train_here
    begin(config, plan, partial(_watch, config, json), partial(_ready, config, fresh, json))


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
    from shoal.train.prepare import prepare_data
    from shoal.train.setup import fit
    from shoal.train.verify import verify as compare

    plan = fit(config, plan, _fewest(plan))
    _announce(config, json)
    with _progress(quiet=json) as progress:
        prepare_data(config, progress)
    if not json:
        if plan.ranks == plan.mb == 1:
            console.print("this layout is one process itself; name one to compare with --layout, such as dp=4,mb=2")
        console.print(
            f"[bold]{escape(str(plan))}[/] beside one process: {steps} steps, labels masked unequally, {plan.dtype}"
        )
    with Pool(plan.ranks) as pool, console.status("running") if not json else _nothing():
        report = compare(config, plan, pool, steps)
    if json:
        typer.echo(jsonlib.dumps(report.as_json()))
    else:
        from shoal.report.parity import parity_table

        console.print(parity_table(report))
    raise typer.Exit(0 if report.agree else 1)


@app.command(name="layout")
def show_layout(
    layout: Annotated[str, typer.Argument(metavar="LAYOUT", help="how the work is spread, such as dp=2,tp=2,zero=3")],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE.svg", help="where the picture goes; default: out/layout-….svg")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN.toml", help="the run file with the model; default: a small one")
    ] = None,
    picture: Annotated[bool, typer.Option("--picture", help="draw it too")] = False,
    json: JsonOption = False,
) -> None:
    """Show what a layout means, and who holds which block of each weight, before anything is rented.

    Example: shoal layout dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4 --picture
    """
    from shoal.report.example import example
    from shoal.report.layout import layout_report
    from shoal.report.layout_picture import picture_path, write_picture
    from shoal.report.ownership import ownership, shown
    from shoal.train.setup import fit, make_model

    plan = Layout.parse(layout)
    config, plan = _read(run, layout, None) if run is not None else (example(plan), plan)
    try:
        plan = fit(config, plan, _fewest(plan))
    except LayoutError as error:
        if run is None:
            error.add_note("this is about a small model that serves as an example; name yours with --run RUN.toml")
        raise
    drawn = picture_path(plan, file) if picture or file is not None else None
    model = make_model(config, plan)
    owned = ownership(model, plan, shown(plan))
    if drawn is not None:
        write_picture(owned, drawn)
    if json:
        typer.echo(jsonlib.dumps(ownership(model, plan).as_json()))
        return
    console.print(layout_report(owned), soft_wrap=False)
    console.print("\n" + (f"picture: {escape(str(drawn))}" if drawn is not None else "--picture draws it"))


@data.command(name="make")
def make_data(
    text: Annotated[Path, typer.Argument(help="a .txt, .jsonl or .parquet file, or a folder of them")],
    out: Annotated[Path, typer.Argument(help="the token store to write, a new folder")],
    tokenizer: Annotated[Path | None, typer.Option(help="a tokenizer.json to use")] = None,
    train_vocab: Annotated[int | None, typer.Option(help="or: train a BPE of so many entries on it", min=257)] = None,
    separator: Annotated[str | None, typer.Option(help="what stands between documents of a text file")] = None,
    field: Annotated[str | None, typer.Option(help="the field or column that holds the text; default: found")] = None,
    template: Annotated[str | None, typer.Option(help="chatml, llama-3 or plain, for chats; default: found")] = None,
    end_of_document: Annotated[str, typer.Option(help="the token that ends a document")] = "<|endoftext|>",
    workers: Annotated[int | None, typer.Option(help="processes; default: one a CPU", min=1)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a store that is there")] = False,
    json: JsonOption = False,
) -> None:
    """Tokenise text, chats, or prompts and completions into a memory-mapped token store.

    Example: shoal data data/kjv.txt data/kjv.store --train-vocab 2048 --separator $'\\n\\n\\n'
    """
    if (tokenizer is None) == (train_vocab is None):
        raise ConfigError("shoal data: give either --tokenizer tokenizer.json or --train-vocab N, such as 2048")
    from shoal.report.samples import store_told
    from shoal.train.prepare import make_store

    with _progress(quiet=json) as progress:
        store = make_store(
            text, out, tokenizer=tokenizer, vocab=train_vocab, separator=separator, field=field, template=template,
            end_of_document=end_of_document, workers=workers, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    console.print(store_told(store)) if not json else typer.echo(jsonlib.dumps(store.as_json()))


@data.command(name="inspect")
def inspect_data(
    path: Annotated[Path, typer.Argument(metavar="STORE_OR_RUN", help="a token store, a run file or a run's folder")],
    count: Annotated[int, typer.Option("-n", help="documents or samples to show", min=0)] = 3,
    step: Annotated[int | None, typer.Option(help="the step of a run, from 0", min=0)] = None,
    json: JsonOption = False,
) -> None:
    """Show documents of a store, or the samples of a step, as text: what counts in the loss in colour.

    Example: shoal data inspect runs/quickstart.toml --step 7
    """
    from shoal.report.samples import look_told
    from shoal.train.samples import look

    found = look(path, count, step)
    console.print(look_told(found, console)) if not json else typer.echo(jsonlib.dumps(found.as_json()))


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
    verify: Annotated[bool, typer.Option("--verify", help="read everything and compare checksums")] = False,
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


@app.command(name="import")
def import_folder(
    folder: Annotated[Path, typer.Argument(metavar="HF_DIR", help="a Hugging Face folder: config.json, safetensors")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="the new folder")],
    json: JsonOption = False,
) -> None:
    """Make a checkpoint and a run file of a Hugging Face model: Llama, Mistral, Qwen 2 and 3, Gemma, GPT-2.

    Example: shoal import SmolLM2-135M out/smollm2
    """
    from shoal.train.importing import import_hf

    if not json:
        console.print(f"reading {escape(str(folder))} into {escape(str(out))}, a new folder")
    with _progress(quiet=json) as progress:
        made = import_hf(folder, out, progress)
    typer.echo(jsonlib.dumps(made.as_json()) if json else made.told())


@app.command(name="export")
def export_folder(
    checkpoint: Annotated[Path, typer.Argument(help="a run's folder, or one of its checkpoints")],
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="the new Hugging Face folder")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or float64; default: as it is stored")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as a folder that transformers loads.

    Example: shoal export out/smollm2-tuned smollm2-tuned-hf --dtype bfloat16
    """
    from shoal.train.exporting import export_hf

    if not json:
        console.print(f"writing {escape(str(checkpoint))} to {escape(str(out))}, a new folder")
    with _progress(quiet=json) as progress:
        made = export_hf(checkpoint, out, progress, dtype=dtype)
    typer.echo(jsonlib.dumps(made.as_json()) if json else made.told())


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
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(lines)}")


def _read(run: Path, layout: str | None, overrides: Sequence[str] | None) -> tuple[Config, Layout]:
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


def _fewest(plan: Layout) -> int:
    """The ranks a layout has; one replica where it leaves their number open."""
    return replace(plan, dp=1).ranks if plan.dp == -1 else plan.ranks


@contextmanager
def _ready(config: Config, fresh: bool, json: bool) -> Iterator[None]:
    """Check what the run needs, before anything is written, and hold its folder."""
    from shoal.train.folder import occupy
    from shoal.train.prepare import prepare

    _announce(config, json)
    with _progress(quiet=json) as progress:
        prepare(config, progress, fresh=fresh)
    with occupy(config, fresh=fresh) as aside:
        if aside is not None and not json:
            console.print(f"the earlier run is now {escape(str(aside))}")
        yield


def _announce(config: Config, json: bool) -> None:
    """Say that a token store will be made, and from what: a path that was mistyped shows here."""
    data = config.data
    if data.source == "tokens" and data.path and data.text and not data.path.exists() and not json:
        console.print(f"making {escape(str(data.path))}, which is missing, from {escape(str(data.text))}")


def _watch(config: Config, json: bool) -> Sequence[Sink]:
    """What the first rank shows, besides the files it writes."""
    from shoal.report.console import ConsoleSink
    from shoal.train.metrics import JsonLines

    return [JsonLines(sys.stdout, only=("step",))] if json else [ConsoleSink(config)]


@contextmanager
def _nothing() -> Iterator[Any]:
    yield None


__all__ = ["app", "main"]


if __name__ == "__main__":
    main()
