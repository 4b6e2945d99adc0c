"""What the commands need to measure: the layers of a run file's model, one by one, in this process."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, cast

import typer
from rich.markup import escape

from shoal.cli.common import announce, console, fewest, progress_bar, read
from shoal.config import Config
from shoal.errors import ConfigError, LayoutError, nearest, setting
from shoal.layout import Layout

if TYPE_CHECKING:
    from shoal.pipeline.layer_costs import LayerCosts
    from shoal.report.measured import Balance, Measured

_BALANCES = ("time", "memory")


def measured_schedule(
    name: str,
    ranks: int | None,
    micro_batches: int | None,
    chunks: int | None,
    memory: float | None,
    run: Path,
    layout: str | None,
    overrides: Sequence[str] | None,
    *,
    balance: str,
    transfer_ms: float,
    json: bool,
) -> Measured:
    """The schedule ``name`` with the layers of ``run`` as they are measured: over as many ranks, micro-batches and
    stages a rank, and in as much memory, as are asked for or else as the layout has."""
    from shoal.report.measured import with_measured
    from shoal.train.setup import fit, make_model

    if balance not in _BALANCES:
        problem = f"is not what stages are balanced by{nearest(balance, _BALANCES)}"
        raise ConfigError(setting("--balance", balance, problem, "use time or memory"))
    config, plan = read(run, layout, overrides)
    plan = _named(plan, name, ranks, micro_batches, chunks, memory)
    plan = fit(config, plan, fewest(plan))
    if (plan.tp, plan.cp) != (1, 1):
        key = "tp" if plan.tp > 1 else "cp"
        raise LayoutError(
            setting(f"layout.{key}", getattr(plan, key), "layers are measured whole, in one process", f"use {key}=1")
        )
    costs = _measure(config, plan, json)
    model = make_model(config, plan)
    by = cast("Balance", balance)
    return with_measured(plan, model.layers(), model.roles, costs, by=by, transfer=transfer_ms / 1e3)


def show_measured(found: Measured, run: Path, picture: Path | None, json: bool) -> None:
    """Print it, and draw it where a ``picture`` is asked for."""
    from shoal.report.measured import measured_report, to_do_with
    from shoal.report.pipeline_picture import write_picture

    if picture is not None:
        write_picture(found.seen, picture)
    if json:
        typer.echo(jsonlib.dumps(found.as_json()))
        return
    console.print(measured_report(found, run), soft_wrap=False)
    if picture is not None:
        console.print(f"\npicture: {escape(str(picture))}, times in milliseconds")
    console.print("\nWhat to try next:")
    for what, command in to_do_with(found, run):
        console.print(f"  {what:<36}[bold]{escape(command)}[/]")
    console.print(f"\nlayout to use: [bold]--layout {escape(quote(str(found.layout)))}[/]")


def _named(
    plan: Layout,
    name: str,
    ranks: int | None,
    micro_batches: int | None,
    chunks: int | None,
    memory: float | None,
) -> Layout:
    """The layout with the pipeline that is asked for. What it says of stages, times and memory it says of its own."""
    from shoal.report.pipeline import admitted

    if ranks is None and plan.pp == 1:
        problem = "neither it nor the layout says over how many ranks"
        raise ConfigError(setting("-p", "(nothing)", problem, "use -p 4, or --layout pp=4,mb=8"))
    ranks, micro_batches = ranks or plan.pp, micro_batches or plan.mb
    same = plan.schedule == name
    chunks = admitted(name, ranks, micro_batches, chunks or (plan.chunks if same else None), memory)
    return replace(
        plan,
        pp=ranks,
        schedule=name,
        chunks=chunks,
        mb=micro_batches,
        stage_layers=plan.stage_layers if plan.stages == ranks * chunks else None,
        list_times=None,
        list_memory=memory or (plan.list_memory if same else None),
    )


def _measure(config: Config, plan: Layout, json: bool) -> LayerCosts:
    """The layers as each rank of ``plan`` would run them were they all its own, on the CPU."""
    import torch

    from shoal.build import run_of, stages_of
    from shoal.feed import micro_batches
    from shoal.pipeline.measure import measure
    from shoal.tensor.whole import Whole
    from shoal.train.prepare import prepare_data
    from shoal.train.setup import make_model, materialise_alone

    announce(config, json)
    model = make_model(config, plan)
    layers = model.layers()
    stage_of = {unit: at for at, units in enumerate(stages_of(plan, layers, model.roles)) for unit in units}
    runs = [run_of(plan, model, Whole(), unit, stage_of[unit]) for unit in range(len(layers))]
    threads = max(1, torch.get_num_threads() // plan.ranks)
    samples = config.data.batch // (plan.dp * plan.mb)
    with progress_bar(quiet=json) as progress:
        source = prepare_data(config, progress)
        if not json:
            console.print(
                f"measuring the {len(layers)} layers of {escape(config.run.name)}, one by one, in this process: "
                f"micro-batches of {samples} samples × {config.data.seq_len:,} positions, {plan.dtype}, "
                f"CPU, {threads} thread{'s' * (threads > 1)}"
            )
        torch.set_num_threads(threads)
        materialise_alone(model, config.run.seed)
        batch = micro_batches(source.batch(0, 0, plan.dp), plan.mb, torch.device("cpu"))[0]
        return measure(model, batch, runs=runs, seen=partial(progress, "measuring layers"))
