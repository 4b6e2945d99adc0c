"""The command about pipeline schedules: schedule."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from shoal.cli.common import JsonOption, LayoutOption, SetOption, console, nothing, tell_next
from shoal.cli.measuring import Shape, measured_schedule, show_measured
from shoal.errors import ConfigError, setting


def show_schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="such as 1f1b, interleaved, zb-v, list or pipedream")],
    ranks: Annotated[int | None, typer.Option("-p", help="ranks of the pipeline", min=1)] = None,
    micro_batches: Annotated[int | None, typer.Option("-m", help="micro-batches of a step", min=1)] = None,
    chunks: Annotated[int | None, typer.Option("-v", help="stages a rank; default: the schedule's own", min=1)] = None,
    times: Annotated[
        str | None,
        typer.Option(
            metavar="F,I,W,C",
            help="what a micro-batch takes on a rank: forward, backward for the input and for the weights, and moving "
            "on to the next rank; default: 1,1,1,0",
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="M",
            help="of list: the most micro-batches, not bytes, whose activations a rank holds; default: -p of them",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN.toml", help="measure the layers of this run file's model instead"),
    ] = None,
    layout: LayoutOption = None,
    set_: SetOption = None,
    balance: Annotated[
        str | None, typer.Option(metavar="time|memory", help="with --run: what stages are balanced by; default: time")
    ] = None,
    transfer: Annotated[
        float | None, typer.Option(metavar="MS", help="with --run: milliseconds to move on to the next rank", min=0)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.svg|FILE.html", help="draw it, too, into this file")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show who does what, when, under a pipeline schedule: its bubble, live activations and weight versions.

    With --run the layers of a model are measured first, one by one, and stages cut to suit: then it ends with the
    layout to train with.

    Example: shoal schedule zb-v -p 4 -m 8 --picture out/zb-v.svg
    """
    from shoal.report.pipeline import ALIKE, PassTimes, pipeline
    from shoal.report.pipeline_picture import picture_path, write_picture
    from shoal.report.pipeline_terminal import pipeline_report
    from shoal.report.pipeline_words import next_steps

    if picture is not None:
        picture_path(picture)
    if run is not None:
        if times is not None:
            raise ConfigError(setting("--times", times, "with --run times are measured", "leave out one of them"))
        from shoal.report.measured import Asked

        asked = Asked(layout, set_ or (), balance, transfer)
        found, line = measured_schedule(name, Shape(ranks, micro_batches, chunks, memory), run, asked, json=json)
        show_measured(found, line, run, asked, picture, json=json)
        return
    of_a_run = {"--layout": layout, "--set": set_, "--balance": balance, "--transfer": transfer}
    for option, given in of_a_run.items():
        if given is not None:
            raise ConfigError(setting(option, given, "is about the model of a run file", "name it with --run RUN.toml"))
    ranks, micro_batches = _given("-p", ranks), _given("-m", micro_batches)
    with console.status("looking for the best order") if name == "list" and not json else nothing():
        seen = pipeline(name, ranks, micro_batches, chunks, ALIKE if times is None else PassTimes.parse(times), memory)
    if picture is not None:
        write_picture(seen, picture)
    if json:
        typer.echo(jsonlib.dumps(seen.as_json()))
        return
    console.print(pipeline_report(seen), soft_wrap=False)
    if picture is not None:
        console.print(f"\npicture: {escape(str(picture))}")
    tell_next(next_steps(seen, picture is not None, memory))


def _given(option: str, number: int | None) -> int:
    if number is None:
        what = {"-p": "ranks of the pipeline", "-m": "micro-batches of a step"}[option]
        legal = f"use {option} 4, or name a run file with --run RUN.toml"
        raise ConfigError(setting(option, "(nothing)", f"how many {what}", legal))
    return number
