"""What the commands need to measure: the layers of a run file's model, one by one, in this process."""

from __future__ import annotations

import json as jsonlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple, cast

import typer
from rich.markup import escape

from shoal.cli.common import announce, console, fewest, nothing, progress_bar, read, tell_next
from shoal.config import Config, load
from shoal.errors import ConfigError, LayoutError, nearest, setting
from shoal.layout import Layout

if TYPE_CHECKING:
    from shoal.pipeline.layer_costs import LayerCosts
    from shoal.report.measured import Asked, Balance, Measured

_BALANCES = ("time", "memory")
_LONG = 1e12
"""Milliseconds: a layout takes no longer times."""


class Shape(NamedTuple):
    """The pipeline that is asked for; None leaves it to the layout."""

    ranks: int | None
    micro_batches: int | None
    chunks: int | None
    memory: float | None


def measured_schedule(name: str, shape: Shape, run: Path, asked: Asked, *, json: bool) -> tuple[Measured, str]:
    """The schedule ``name`` with the layers of ``run`` as they are measured: over as many ranks, micro-batches and
    stages a rank, and in as much memory, as are asked for or else as the layout has. Also the layout that was found, as
    ``--layout`` takes it beside ``run``."""
    from shoal.report.measured import with_measured
    from shoal.train.setup import make_model

    balance = asked.balance or "time"
    if balance not in _BALANCES:
        problem = f"is not what stages are balanced by{nearest(balance, _BALANCES)}"
        raise ConfigError(setting("--balance", balance, problem, "use time or memory"))
    if asked.transfer is not None and not asked.transfer < _LONG:
        raise ConfigError(setting("--transfer", asked.transfer, f"is not a time below {_LONG:g} ms", "use 0.5"))
    config, plan, replicas = planned(name, shape, run, asked)
    costs = _measure(config, plan, json)
    model = make_model(config, plan)
    with nothing() if json else console.status("cutting stages"):
        found = with_measured(
            plan, model.layers(), model.roles, costs, config.optimizer,
            by=cast("Balance", balance), transfer=(asked.transfer or 0.0) / 1e3,
        )  # fmt: skip
    found = replace(found, layout=replace(found.layout, dp=replicas))
    return found, _line(found.layout, load(run, asked.overrides))


def planned(name: str, shape: Shape, run: Path, asked: Asked) -> tuple[Config, Layout, int]:
    """The run file, the layout that is to be measured, checked against it, and the replicas that were asked for: they
    may be all for which there are ranks, of which one is enough to measure."""
    from shoal.train.setup import fit

    config, plan = read(run, asked.layout, asked.overrides)
    plan, replicas = _named(plan, name, shape), plan.dp
    plan = fit(config, plan, fewest(plan))
    if (plan.tp, plan.cp) != (1, 1):
        key = "tp" if plan.tp > 1 else "cp"
        raise LayoutError(
            setting(f"layout.{key}", getattr(plan, key), "layers are measured whole, in one process", f"use {key}=1")
        )
    if plan.recompute_stages is not None and plan.stage_layers is None and plan.stages > 1:
        problem = "which layers it is about is not known before they are measured"
        legal = f"use recompute={plan.recompute}, or say what stages have, as in pp=2:1f1b{{layers=4/4}}"
        raise LayoutError(setting("layout.recompute", plan.table()["recompute"], problem, legal))
    return config, plan, replicas


def _line(layout: Layout, beside: Config) -> str:
    """A file's dtype would be taken where a line names none, and a line has none for the default."""
    line = str(layout)
    return line if "dtype" not in beside.layout or "dtype" in line else f"{line},dtype={layout.dtype}"


def show_measured(found: Measured, line: str, run: Path, asked: Asked, picture: Path | None, *, json: bool) -> None:
    """Print it, and draw it where a ``picture`` is asked for. ``line`` is the layout to use."""
    from shoal.report.measured import measured_report, to_do_with
    from shoal.report.pipeline_picture import write_picture

    if picture is not None:
        write_picture(found.seen, picture)
    if json:
        typer.echo(jsonlib.dumps(found.as_json() | {"layout": line}))
        return
    console.print(measured_report(found, run), soft_wrap=False)
    if picture is not None:
        console.print(f"\npicture: {escape(str(picture))}, times in milliseconds")
    tell_next(to_do_with(found, run, line, asked))
    console.print(f"\nlayout to use: [bold]--layout {escape(quote(line))}[/]")


def _named(plan: Layout, name: str, shape: Shape) -> Layout:
    """The layout with the pipeline that is asked for. What it says of stages, times and memory it says of its own."""
    from shoal.report.pipeline import admitted

    ranks, micro_batches, chunks, memory = shape
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
