"""The command that runs one rank of a job by itself: dryrun."""

from __future__ import annotations

import json as jsonlib
import time
from typing import Annotated

import typer
from rich.markup import escape

from shoal.cli.common import (
    JsonOption,
    LayoutOption,
    RunFile,
    SetOption,
    console,
    fewest,
    progress_bar,
    read,
    tell_next,
)


def dryrun(
    run: RunFile,
    layout: LayoutOption = None,
    world: Annotated[
        int | None, typer.Option("--world", metavar="N", help="ranks of the job; default: those of the layout", min=1)
    ] = None,
    rank: Annotated[int, typer.Option("--rank", metavar="R", help="the rank to run")] = 0,
    set_: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Run one rank of a job of any size, here and alone: its real code, on tensors without memory.

    Shows what it would hold on its device, what it would receive from other ranks and for what, and the actions of its
    step; and fails where the job would.

    Example: shoal dryrun runs/llama3-405b.toml --world 16384 --rank 0
    """
    config, plan = read(run, layout, set_)
    from shoal.report.dryrun import dryrun_report, next_steps
    from shoal.train.dryrun import check
    from shoal.train.dryrun import dryrun as run_dry
    from shoal.train.setup import fit

    plan = fit(config, plan, world or fewest(plan))
    check(plan, rank)
    if not json:
        taken = ", random samples, and as many tokens for each expert" * (config.model.experts > 0)
        console.print(
            f"rank {rank:,} of {plan.ranks:,} of {escape(config.run.name)}, dry: its code on tensors without memory"
            f"{taken or ', and random samples'}"
        )
    start = time.monotonic()
    with progress_bar(quiet=json) as progress:
        found = run_dry(config, plan, rank, progress)
    if json:
        typer.echo(jsonlib.dumps(found.as_json()))
        return
    console.print(dryrun_report(found, time.monotonic() - start), soft_wrap=False)
    tell_next(next_steps(found, plan, run, set_ or ()))
