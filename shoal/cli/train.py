"""Commands about runs and layouts: train, verify, layout."""

from __future__ import annotations

import json as jsonlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import join
from typing import Annotated

import typer
from rich.markup import escape

from shoal import config as configuration
from shoal.cli.auto import chosen, ranks_here
from shoal.cli.common import (
    JsonOption,
    LayoutOption,
    RunFile,
    SetOption,
    announce,
    console,
    fewest,
    nothing,
    progress_bar,
    read,
    ready,
    watch,
)
from shoal.errors import ConfigError, LayoutError, setting
from shoal.layout import Layout

_STEPS = 5


def train(
    run: RunFile,
    layout: LayoutOption = None,
    set_: SetOption = None,
    processes: Annotated[
        int | None, typer.Option("-n", help="local processes to start; default: as many as the layout has ranks", min=1)
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="start at step 0; an earlier run is moved aside")] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="write what a few steps did to trace.json of the run, for shoal report and ui.perfetto.dev"
        ),
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="write what a step holds to memory.json of the run, for shoal report")
    ] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="print every setting and stop")] = False,
    json: JsonOption = False,
) -> None:
    """Train the model of a run file, from its newest checkpoint if there is one.

    Starts local processes, or joins the ranks that torchrun or Slurm has started.

    Example: shoal train runs/quickstart.toml --layout dp=2 --set run.steps=50
    """
    config, plan = read(run, layout, set_)
    if print_config:
        typer.echo(configuration.toml(config), nl=False)
        return
    from shoal.train.asked import Asked
    from shoal.train.launch import launched, train_here, train_joined
    from shoal.train.setup import fit

    joined = launched()
    if joined and processes not in (None, joined):
        problem = f"the launcher has started {joined}"
        raise ConfigError(setting("-n", processes, problem, f"leave it out, or use -n {joined}"))
    asked = Asked(fresh=fresh, trace=trace, memory=memory)
    choose = None
    if plan.auto:
        choose = partial(chosen, config, plan, joined or processes or ranks_here(config), quiet=json)
        if not joined:
            plan, choose = choose(), None
            config = config.model_copy(update={"layout": plan.table()})
    if choose is None:
        plan = fit(config, plan, joined or processes or fewest(plan))
    shown, before = partial(watch, config, json), partial(ready, config, plan, asked, json)
    if joined:
        train_joined(config, plan, shown, before, asked, choose)
    else:
        train_here(config, plan, shown, before, asked)


def verify(
    run: RunFile,
    layout: LayoutOption = None,
    set_: SetOption = None,
    steps: Annotated[int, typer.Option(help="optimizer steps to compare", min=1)] = _STEPS,
    json: JsonOption = False,
) -> None:
    """Run a layout beside one process and compare loss, gradient norm, gradients and weights, per parameter.

    Exits with 1 when they disagree.

    Example: shoal verify runs/tiny.toml --layout dp=4,mb=2
    """
    config, plan = read(run, layout, set_)
    from shoal.train.pool import Pool
    from shoal.train.prepare import prepare_data
    from shoal.train.setup import fit
    from shoal.train.verify import verify as compare

    if plan.auto:
        plan = chosen(config, plan, ranks_here(config), quiet=json)
        config = config.model_copy(update={"layout": plan.table()})
    plan = fit(config, plan, fewest(plan))
    announce(config, json)
    with progress_bar(quiet=json) as progress:
        prepare_data(config, progress)
    if not json:
        if plan.ranks == plan.mb == 1:
            console.print("this layout is one process itself; name one to compare with --layout, such as dp=4,mb=2")
        console.print(
            f"[bold]{escape(str(plan))}[/] beside one process: {steps} steps, labels masked unequally, {plan.dtype}"
        )
    with Pool(plan.ranks) as pool, console.status("running") if not json else nothing():
        report = compare(config, plan, pool, steps)
    if json:
        typer.echo(jsonlib.dumps(report.as_json()))
    else:
        from shoal.report.parity import parity_table

        console.print(parity_table(report))
        if not report.agree and plan.dtype == "float32":
            again = ["shoal", "verify", str(run), "--layout", str(replace(plan, dtype="float64"))]
            again += [word for one in set_ or () for word in ("--set", one)]
            again += ["--steps", str(steps)] * (steps != _STEPS)
            console.print("That may be more than float32 rounds, or not: in float64, rounding hides nothing.")
            console.print(f"  [bold]{escape(join(again))}[/]")
    raise typer.Exit(0 if report.agree else 1)


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
    config, plan = read(run, layout, None) if run is not None else (example(plan), plan)
    try:
        plan = fit(config, plan, fewest(plan))
    except LayoutError as error:
        if run is None:
            error.add_note("this is about a small model that serves as an example; name yours with --run RUN.toml")
        raise
    drawn = picture_path(plan, file) if picture or file is not None else None
    model = make_model(config, plan)
    owned = ownership(model, plan, shown(plan), config.optimizer)
    if drawn is not None:
        write_picture(owned, drawn)
    if json:
        typer.echo(jsonlib.dumps(ownership(model, plan).as_json()))
        return
    console.print(layout_report(owned), soft_wrap=False)
    console.print("\n" + (f"picture: {escape(str(drawn))}" if drawn is not None else "--picture draws it"))
