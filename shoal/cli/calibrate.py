"""The command that measures the machine it runs on: calibrate."""

from __future__ import annotations

import json as jsonlib
import time
from typing import Annotated

import typer
from rich.markup import escape

from shoal.cli import here
from shoal.cli.common import JsonOption, console, progress_bar, tell_next


def calibrate(
    again: Annotated[bool, typer.Option("--again", help="measure even if this machine was measured before")] = False,
    json: JsonOption = False,
) -> None:
    """Measure this machine, so that plans for it rest on what it does: --cluster here, and --layout auto.

    Takes about two minutes while nothing else runs. What is found is kept in the user's cache, for this hardware and
    these libraries.

    Example: shoal calibrate
    """
    start = time.monotonic()
    found = None if again else here.known()
    fresh = found is None
    if found is None:
        with progress_bar(quiet=json) as progress:
            found = here.measured_here(progress)
        here.keep(found)
    took = time.monotonic() - start
    if json:
        typer.echo(jsonlib.dumps({**found.as_json(), "path": str(here.place()), "measured": fresh, "seconds": took}))
        return
    console.print(escape(found.what))
    for dtype, of in found.devices.items():
        for threads, device in of.items():
            rate = device.matmul * (1000 if dtype == "bf16" else 500)
            console.print(
                f"  {dtype:<8} {threads} thread{'s' * (threads > 1)}: matrix products {rate:,.0f} GFLOP/s, "
                f"memory {device.memory_rate:.1f} GB/s, messages {device.link:.1f} GB/s"
            )
    console.print(
        f"  messages start in {found.values['latency.inside']:.0f} us, operations in "
        f"{found.values['launch.eager']:.1f} us; steps of small models are met within {100 * found.off:.0f} % (median)"
    )
    console.print(f"{'measured' if fresh else 'measured before'}, in {took:.0f} s; kept in {escape(str(here.place()))}")
    tell_next([("plan for this machine", "shoal plan runs/quickstart.toml --cluster here")])
