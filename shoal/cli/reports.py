"""The command about what a run did: report."""

from __future__ import annotations

import json as jsonlib
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from shoal.cli.common import JsonOption, console, tell_next


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run's folder, or the trace or memory.json in it")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.svg|FILE.html", help="draw it, too, into this file")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="the step to show; default: the one of median length", min=1)
    ] = None,
    rank: Annotated[int, typer.Option("--rank", help="the pipeline to show is that of this rank", min=0)] = 0,
    memory: Annotated[
        bool, typer.Option("--memory", help="show what a step held; default: where there is that and no trace")
    ] = False,
    experts: Annotated[
        bool, typer.Option("--experts", help="show how evenly experts were loaded, over all steps of a run")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Lay a step of a traced run over its simulation: where it took longer, and what ranks waited for. Or show what a
    step held on each rank, by phase, and what it was for; or the load of experts over time.

    shoal train --trace writes the trace. The simulation runs the same program with the times of passes and messages as
    the trace has them. shoal train --memory measures a step.

    Example: shoal report out/quickstart --out out/quickstart/report.svg
    """
    if experts:
        _report_experts(run, out, json=json)
        return
    if memory or _has_memory_alone(run):
        _report_memory(run, out, json=json)
        return
    from shoal.report.overlay import overlay
    from shoal.report.overlay_file import read_trace, trace_path
    from shoal.report.overlay_picture import picture_path, write_picture
    from shoal.report.overlay_terminal import overlay_report
    from shoal.report.overlay_words import next_steps

    if out is not None:
        picture_path(out)
    path = trace_path(run)
    seen = overlay(read_trace(path), step, rank)
    if out is not None:
        write_picture(seen, out)
    if json:
        typer.echo(jsonlib.dumps(seen.as_json()))
        return
    console.print(overlay_report(seen), soft_wrap=False)
    if out is not None:
        console.print(f"\npicture: {escape(str(out))}")
    tell_next(next_steps(seen, run, path, drawn=out is not None))


def _has_memory_alone(run: Path) -> bool:
    from shoal.memory.account import MEMORY
    from shoal.pipeline.trace_file import TRACE

    if run.is_dir():
        return (run / MEMORY).is_file() and not (run / TRACE).is_file()
    return run.name == MEMORY


def _report_memory(run: Path, out: Path | None, *, json: bool) -> None:
    from shoal.report.memory_file import memory_path, read_memory
    from shoal.report.memory_picture import picture_path, write_picture
    from shoal.report.memory_terminal import memory_report
    from shoal.report.memory_words import next_steps

    if out is not None:
        picture_path(out)
    found = read_memory(memory_path(run))
    if out is not None:
        write_picture(found, out)
    if json:
        typer.echo(jsonlib.dumps(found.as_json()))
        return
    console.print(memory_report(found), soft_wrap=False)
    if out is not None:
        console.print(f"\npicture: {escape(str(out))}")
    tell_next(next_steps(found, run, drawn=out is not None))


def _report_experts(run: Path, out: Path | None, *, json: bool) -> None:
    from shoal.report.expert_load import load_report, picture_path, read_loads, write_picture

    if out is not None:
        picture_path(out)
    seen = read_loads(run)
    if out is not None:
        write_picture(seen, out)
    if json:
        typer.echo(jsonlib.dumps(seen.as_json()))
        return
    console.print(load_report(seen), soft_wrap=False)
    if out is not None:
        console.print(f"picture: {escape(str(out))}")
    else:
        again = shlex.quote(str(run))
        tell_next([("a picture of this", f"shoal report {again} --experts --out {again}/experts.svg")])
