"""The layout that the planner takes for the ranks that there are: ``--layout auto``.

The planner says what is fast, and the code itself what fits: of its plans, best first, the ranks that hold most are run
dry, and the first plan whose every peak stays below the budget is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape

from shoal.cli import here
from shoal.cli.common import console
from shoal.config import Config
from shoal.errors import ConfigError, LayoutError, ShoalError, setting
from shoal.layout import Layout
from shoal.sizes import size_text

if TYPE_CHECKING:
    from shoal.plan.hardware import Cluster
    from shoal.plan.profile import Constants, Profile
    from shoal.plan.search import Plan, Search

_GIB = 2**30
_SAFE = 0.97
"""Of a budget, what a dry run's peak may come to."""
_SHARES = (1.0, 0.8, 0.6, 0.4, 1.6, 2.5)
"""Of a budget, what plans are looked for in, one after the other, until one fits: the planner's formulas may be off by
more than a small model's memory."""
_PLANS = 8
"""Plans of one search."""


class Machines(NamedTuple):
    """What is planned for, and what the planner knows of it."""

    cluster: Cluster
    constants: Constants
    profile: Profile
    source: str


class Choice(NamedTuple):
    """What was taken: a plan, the next best that fits or not, and what was seen of its memory."""

    layout: Layout
    plan: Plan
    others: list[Plan]
    peak: int
    """Bytes of the rank that holds most."""
    too_large: list[tuple[str, int]]
    """Plans that were passed over, and what a rank of theirs would hold."""


def ranks_here(config: Config) -> int:
    """The ranks of this machine when nobody says how many: its GPUs, or its cores."""
    if _on_gpus(config):
        import torch

        return torch.cuda.device_count()
    return here.cores()


def check_alone(plan: Layout) -> None:
    """Raises :class:`LayoutError` where something is named beside ``auto`` that it chooses itself."""
    others = [key for key in plan.table() if key not in ("auto", "dtype")]
    if others:
        dtype = f",dtype={plan.dtype}" if plan.dtype != "float32" else ""
        raise LayoutError(
            setting("layout", str(plan), f"auto chooses {', '.join(others)} itself", f"use auto{dtype}, or leave auto out")
        )


def chosen(config: Config, plan: Layout, ranks: int, *, quiet: bool) -> Layout:
    """The layout for ``ranks`` ranks, told about unless ``quiet``. ``plan`` is what stands beside ``auto``: its dtype.

    Raises :class:`ConfigError` where none fits.
    """
    from shoal.plan.search import Search
    from shoal.plan.shape import of_model
    from shoal.plan.work import Job

    check_alone(plan)
    machines = machines_of(config, plan, ranks)
    budget = config.memory.budget_gib or machines.cluster.device.memory_gib
    shape, data = of_model(config.model), config.data

    def within(gib: float) -> Search:
        device = replace(machines.cluster.device, memory_gib=gib)
        cluster = replace(machines.cluster, device=device)
        return Search(Job(shape, cluster, data.seq_len, data.batch, machines.profile, plan.dtype), machines.constants)

    with console.status(f"planning for {ranks} ranks") if not quiet else suppress():
        choice = _first_that_fits(config, plan, within, budget)
    if not quiet:
        _tell(choice, within(budget), machines, budget, stated=config.memory.budget_gib is not None)
    return choice.layout


def machines_of(config: Config, plan: Layout, ranks: int) -> Machines:
    """This machine: as it was measured, or else the nearest of the catalogue."""
    from shoal.plan import hardware
    from shoal.plan.here import profile
    from shoal.plan.profile import PROFILES, constants

    if _on_gpus(config):
        import torch

        name = torch.cuda.get_device_name().lower().replace(" ", "")
        kind = next((kind for kind in ("gb200", "b200", "h200", "h100", "a100", "v100", "l40s") if kind in name), "h100")
        memory = torch.cuda.get_device_properties(0).total_memory / _GIB
        cluster = hardware.cluster(f"{ranks}x{kind}")
        cluster = replace(cluster, device=replace(cluster.device, memory_gib=memory))
        return Machines(cluster, constants(), PROFILES["shoal"], f"rates of {kind} from the catalogue")
    half = profile(plan.dtype, half_grads=plan.half_grads)
    if (known := here.known()) is not None:
        return Machines(known.cluster(ranks, plan.dtype), known.constants, half, "this machine, as measured")
    cluster = hardware.cluster("laptop").resized(ranks)
    device = replace(cluster.device, memory_gib=here.memory_gib() / ranks)
    cluster = replace(cluster, device=device, nodes=1, per_node=ranks, cores=here.cores())
    return Machines(cluster, constants(), half, "rates of the catalogue; shoal calibrate measures this machine's")


def _on_gpus(config: Config) -> bool:
    if config.run.device == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


def _first_that_fits(config: Config, plan: Layout, within: object, budget: float) -> Choice:
    assert callable(within)
    too_large: list[tuple[str, int]] = []
    seen: set[str] = set()
    for share in _SHARES:
        search: Search = within(budget * share)
        plans = search.run(_PLANS).plans
        for at, (one, layout) in enumerate(_layouts(config, plan, search, plans)):
            if str(layout) in seen:
                continue
            seen.add(str(layout))
            peak = peak_of(config, layout)
            if peak <= _SAFE * budget * _GIB:
                return Choice(layout, one, plans[at + 1 :], peak, too_large)
            too_large.append((str(layout), peak))
    given = config.memory.budget_gib
    if not seen:
        problem = f"no layout of {search.job.cluster.ranks} ranks suits the model and its {config.data.batch} samples"
        raise LayoutError(setting("layout", str(plan), problem, "use another number of ranks, or name a layout"))
    line, least = min(too_large, key=lambda pair: pair[1])
    problem = f"of {len(seen)} layouts for it none fits: {line} needs least, {size_text(least)}"
    legal = f"use {-(-least * 10**4 // round(_SAFE * _GIB)) / 10**4:g} or more, or more ranks"
    raise ConfigError(setting("memory.budget_gib", given if given is not None else f"{budget:.3g}", problem, legal))


def _layouts(config: Config, plan: Layout, search: Search, plans: list[Plan]) -> Iterator[tuple[Plan, Layout]]:
    """The plans as layouts, those that the run file admits."""
    from shoal.plan.layouts import layout_of
    from shoal.train.setup import fit

    for one in plans:
        with suppress(ShoalError):
            layout = layout_of(one.split, search.job.precision, half_grads=plan.half_grads)
            yield one, fit(config, layout, layout.ranks)


def peak_of(config: Config, layout: Layout) -> int:
    """The bytes that the rank which holds most has on its device, by its own code: one rank of each stage is run dry,
    of many stages the ends, for all other ranks of a stage hold no more."""
    from shoal.mesh import Grid
    from shoal.train.dryrun import dryrun

    grid = Grid(layout.axes)
    stages = range(layout.pp) if layout.pp <= 4 else (0, 1, layout.pp - 2, layout.pp - 1)
    first = grid.coords(0)
    return max(dryrun(config, layout, grid.rank({**first, "pp": stage})).peak_bytes for stage in stages)


def _tell(choice: Choice, search: Search, machines: Machines, budget: float, *, stated: bool) -> None:
    from shoal.plan import explain

    plan, cluster = choice.plan, machines.cluster
    console.print(f"auto: [bold]{escape(str(choice.layout))}[/] on {cluster.ranks} ranks ({machines.source})")
    kept = f"{size_text(choice.peak)} on the rank that holds most, by its own code run dry, of {size_text(budget * _GIB)}"
    console.print(f"  predicted: {plan.estimate.step_s:.3g} s a step; {kept}{' allowed' if stated else ''}")
    console.print(f"  why: {explain.binding(plan, search.memory.room / _GIB)}")
    for other in choice.others[:2]:
        console.print(f"  next: {escape(search.line(other))}, {explain.lost(other, plan)}")
    if choice.too_large:
        line, peak = choice.too_large[0]
        more = f", as would {len(choice.too_large) - 1} more" * (len(choice.too_large) > 1)
        console.print(f"  faster, but too large: {escape(line)} would hold {size_text(peak)}{more}")
