"""The command that says what fits, how fast, and why: plan."""

from __future__ import annotations

import json as jsonlib
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from shoal.cli.common import JsonOption, LayoutOption, RunFile, SetOption, console, read, tell_next
from shoal.cli.here import here_cluster
from shoal.cli.tried import check_startable, measured_plans, show_tried
from shoal.errors import LayoutError

if TYPE_CHECKING:
    from shoal.plan.search import Found, Plan, Search

_CLUSTER = "such as 8xh100, 64x8xh100:400G, laptop, cluster.toml, or here: what shoal calibrate measured"
_KEPT = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer", "activations": "activations"}
_KEPT |= {"logits": "logits", "buffers": "buffers"}


def plan(
    run: RunFile,
    cluster: Annotated[str, typer.Option("--cluster", metavar="C", help=_CLUSTER)],
    layout: LayoutOption = None,
    set_: SetOption = None,
    best: Annotated[int, typer.Option("--best", metavar="N", help="plans to show", min=1)] = 8,
    measure: Annotated[
        int, typer.Option("--measure", metavar="N", help="run the best N plans for a few steps on this machine", min=0)
    ] = 0,
    json: JsonOption = False,
) -> None:
    """Say which layouts fit a cluster, how long a step takes under each, and why, before anything is rented.

    The run file's own layout, or --layout, is priced beside the best.

    Example: shoal plan runs/llama3-405b.toml --cluster 2048x8xh100:400G
    """
    from shoal.plan import explain, hardware
    from shoal.plan.here import profile as profile_here
    from shoal.plan.profile import PROFILES, constants
    from shoal.plan.search import Search
    from shoal.plan.shape import of_model
    from shoal.plan.work import Job

    config, wanted = read(run, layout, set_)
    profile, rates = PROFILES["shoal"], constants()
    if wanted.half_grads:
        profile = replace(profile, gradient_bytes=2, reduce_bytes=2)
    if (here := here_cluster(cluster, wanted.dtype)) is not None:
        machines, rates = here[0], here[1].constants
        profile = profile_here(wanted.dtype, half_grads=wanted.half_grads)
    else:
        machines = hardware.cluster(cluster)
    if measure:
        check_startable(config, measure, machines.ranks)
    shape = of_model(config.model)
    job = Job(shape, machines, config.data.seq_len, config.data.batch, profile, wanted.dtype)
    search = Search(job, rates)
    own, fault = None, None
    if not wanted.auto and (layout is not None or config.layout):
        try:
            filled = wanted.fill(machines.ranks)
            filled.check(config.model, job.batch, machines.ranks)
            own = search.own(filled)
        except LayoutError as error:
            if layout is not None:
                raise
            fault = str(error)
    found = search.run(best)
    if not found.plans:
        raise explain.nothing_fits(job, rates)
    changes = [
        {"change": what, "step_s": seconds, "text": text}
        for what, seconds, text in explain.sensitivity(job, found, rates)
    ]
    tried = measured_plans(config, search, found.plans, measure, quiet=json) if measure else []
    winner = tried[0].layout if tried else search.line(found.plans[0])
    if json:
        measured = {"measured": [one._asdict() for one in tried], "winner": winner} if measure else {}
        typer.echo(jsonlib.dumps(_table(search, found, own, fault, changes) | measured))
        return
    _show(search, found, own, fault, changes)
    show_tried(tried)
    tell_next([("train under the best", f"shoal train {run} --layout {winner}")])


def _table(
    search: Search, found: Found, own: Plan | None, fault: str | None, changes: list[dict[str, Any]]
) -> dict[str, Any]:
    from shoal.plan import explain

    job, room = search.job, search.memory.room / 2**30

    def one(plan: Plan) -> dict[str, Any]:
        return {
            "layout": search.line(plan),
            "step_s": plan.estimate.step_s,
            "interval_s": explain.interval(plan.estimate.step_s),
            "memory_gib": plan.gib,
            "fits": search.fits(plan),
            "tokens_per_s": job.batch * job.seq / plan.estimate.step_s,
            "mfu": search.mfu(plan),
            "terms": dict(plan.estimate.terms),
            "memory": {name: getattr(plan.held, name) / 2**30 for name in _KEPT},
            "why": explain.lost(plan, found.plans[0]),
        }

    return {
        "cluster": {"name": job.cluster.name, "ranks": job.cluster.ranks, "device": job.cluster.device.name},
        "model": {"parameters": job.shape.parameters, "active": job.shape.active},
        "room_gib": room,
        "plans": [one(plan) for plan in found.plans],
        "own": one(own) if own else None,
        "own_fault": fault,
        "binding": explain.binding(found.plans[0], room),
        "changes": changes,
        "searched": {"admitted": found.admitted, "too_large": found.too_large, "timed": found.timed},
    }


def _show(search: Search, found: Found, own: Plan | None, fault: str | None, changes: list[dict[str, Any]]) -> None:
    from shoal.plan import explain

    job, room, first = search.job, search.memory.room / 2**30, found.plans[0]
    device = job.cluster.device
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("step s", "right"), ("GiB", "right"), ("MFU", "right"), ("layout", "left"), ("", "left")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for plan in found.plans:
        why = "" if plan is first else explain.lost(plan, first)
        row = f"{plan.estimate.step_s:.3f}", f"{plan.gib:.1f}", f"{100 * search.mfu(plan):.0f} %"
        table.add_row(*row, escape(search.line(plan)), why)
    if own:
        mark = "the run file's" + ("" if search.fits(own) else ": does not fit")
        row = f"{own.estimate.step_s:.3f}", f"{own.gib:.1f}", f"{100 * search.mfu(own):.0f} %"
        table.add_row(*row, escape(search.line(own)), f"{mark}; {explain.lost(own, first)}")
    console.print(table)
    if fault:
        console.print(f"The run file's layout does not suit the cluster: {escape(fault)}")
    low, high = explain.interval(first.estimate.step_s)
    tokens = job.batch * job.seq / first.estimate.step_s
    console.print(f"\nThe best: {low:.3g} to {high:.3g} s a step in four of five cases, {tokens:,.0f} tokens/s.")
    console.print("What binds: " + explain.binding(first, room) + ".")
    parts = sorted(first.estimate.terms.items(), key=lambda part: -abs(part[1]))
    console.print(
        "Time: " + ", ".join(f"{explain.TERMS[n]} {1000 * s:.0f} ms" for n, s in parts if abs(s) > 5e-4) + "."
    )
    kept = [f"{name} {getattr(first.held, name) / 2**30:.1f}" for name in _KEPT if getattr(first.held, name) > 1e6]
    console.print(f"Memory, of {device.memory_gib:g} GiB a device: " + ", ".join(kept) + " GiB.")
    for change in changes:
        console.print(f"With {change['change']}: {change['step_s']:.3f} s a step ({change['text']}).")
    console.print(f"{found.admitted:,} layouts admitted, {found.timed} timed. Rates of {device.name}: {device.source}.")
