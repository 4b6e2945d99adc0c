"""The command about pipeline schedules: schedule."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from shoal.cli.common import JsonOption, console, nothing


def show_schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="such as 1f1b, interleaved, zb-v, list or pipedream")],
    ranks: Annotated[int, typer.Option("-p", help="ranks of the pipeline", min=1)],
    micro_batches: Annotated[int, typer.Option("-m", help="micro-batches of a step", min=1)],
    chunks: Annotated[int | None, typer.Option("-v", help="stages a rank; default: the schedule's own", min=1)] = None,
    times: Annotated[
        str,
        typer.Option(
            metavar="F,I,W,C",
            help="what a micro-batch takes on a rank: forward, backward for the input and for the weights, and moving "
            "on to the next rank",
        ),
    ] = "1,1,1,0",
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.svg|FILE.html", help="draw it, too, into this file")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show who does what, when, under a pipeline schedule: its bubble, live activations and weight versions.

    Example: shoal schedule zb-v -p 4 -m 8 --picture out/zb-v.svg
    """
    from shoal.report.pipeline import Times, pipeline
    from shoal.report.pipeline_picture import picture_path, write_picture
    from shoal.report.pipeline_terminal import pipeline_report
    from shoal.report.pipeline_words import next_steps

    if picture is not None:
        picture_path(picture)
    with console.status("looking for the best order") if name == "list" and not json else nothing():
        seen = pipeline(name, ranks, micro_batches, chunks, Times.parse(times))
    if picture is not None:
        write_picture(seen, picture)
    if json:
        typer.echo(jsonlib.dumps(seen.as_json()))
        return
    console.print(pipeline_report(seen), soft_wrap=False)
    if picture is not None:
        console.print(f"\npicture: {escape(str(picture))}")
    console.print("\nWhat to try next:")
    for what, command in next_steps(seen, drawn=picture is not None):
        console.print(f"  {what:<36}[bold]{escape(command)}[/]")
