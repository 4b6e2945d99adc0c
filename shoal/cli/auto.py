"""The layout that the planner takes for the ranks that there are: ``--layout auto``.

The planner says what is fast, and the code itself what fits: of its plans, best first, the ranks that hold most are run
dry, and the first plan whose every peak stays below the budget is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape

from shoal.cli import here
from shoal.cli.common import console, nothing
from shoal.config import Config
from shoal.errors import ConfigError, LayoutError, ShoalError, setting
from shoal.layout import Layout, Offload
from shoal.sizes import size_text

if TYPE_CHECKING:
    from shoal.plan.hardware import Cluster
    from shoal.plan.profile import Constants, Profile
    from shoal.plan.search import Plan, Search

_GIB = 2**30
_SAFE = 0.97
"""Of a budget, what a dry run's peak may come to."""
_UNEVEN = 0.8
"""Likewise with experts: dry, each has as many tokens, and of real ones a favourite has more."""
_SHARES = (1.0, 0.6, 0.35, 2.0)
"""Of a budget, what plans are looked for in, one after the other, until one fits: the planner's formulas may be off by
more than a small model's memory."""
_PLANS = 5
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
    too_large: list[tuple[Layout, int]]
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
            setting(
                "layout", str(plan), f"auto chooses {', '.join(others)} itself", f"use auto{dtype}, or leave auto out"
            )
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

    with console.status(f"planning for {ranks} ranks") if not quiet else nothing():
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
        kind = next(
            (kind for kind in ("gb200", "b200", "h200", "h100", "a100", "v100", "l40s") if kind in name), "h100"
        )
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


def _first_that_fits(config: Config, plan: Layout, within: Callable[[float], Search], budget: float) -> Choice:
    from shoal.plan.layouts import split_of

    too_large: list[tuple[Layout, int]] = []
    safe = _UNEVEN if config.model.experts else _SAFE
    limit = round(safe * budget * _GIB)

    def fits(layout: Layout) -> int | None:
        """The layout's peak, if it fits and was not seen before."""
        if any(layout == other for other, _ in too_large):
            return None
        peak = peak_of(config, layout, limit)
        if peak > limit:
            too_large.append((layout, peak))
        return peak if peak <= limit else None

    for share in _SHARES:
        search = within(budget * share)
        plans = search.run(_PLANS).plans
        for at, (one, layout) in enumerate(layouts_of(config, search, plans)):
            if (peak := fits(layout)) is not None:
                return Choice(layout, one, plans[at + 1 :], peak, too_large)
    search = within(budget)
    fewest = [layout for layout, _ in sorted(too_large, key=lambda pair: pair[1])[:1]]
    ranks, samples = search.job.cluster.ranks, config.data.batch
    if samples % ranks == 0:
        fewest.insert(0, replace(plan, auto=False, dp=ranks, mb=samples // ranks, zero=3))
    for layout in _frugal(config, fewest):
        if (peak := fits(layout)) is not None:
            return Choice(layout, search.price(split_of(layout, config.data.batch)), [], peak, too_large)
    given = config.memory.budget_gib
    if not too_large:
        problem = f"no layout of {search.job.cluster.ranks} ranks suits the model and its {config.data.batch} samples"
        raise LayoutError(setting("layout", str(plan), problem, "use another number of ranks, or name a layout"))
    least, _ = min(too_large, key=lambda pair: pair[1])
    peak = peak_of(config, least)
    problem = f"none of {len(too_large)} layouts for it fits: {least} needs {size_text(peak)}"
    legal = f"use {ceil(peak / safe / _GIB * 10**4) / 10**4:g} or more, or more ranks"
    raise ConfigError(setting("memory.budget_gib", given if given is not None else f"{budget:.3g}", problem, legal))


def _frugal(config: Config, least: Sequence[Layout]) -> Iterator[Layout]:
    """What takes less memory still than the planner's plans that take ``least``, whatever time that costs."""
    from shoal.train.setup import fit

    parts = ("optimizer",), ("optimizer", "activations", "params", "grads")
    for away in parts:
        for layout in least:
            zero = 3 if layout.alike > 1 else layout.zero
            changed = replace(layout, recompute="full", recompute_stages=None, zero=zero)
            with suppress(ShoalError):
                yield fit(config, replace(changed, offload=tuple(Offload(what, "cpu") for what in away)), layout.ranks)


def layouts_of(config: Config, search: Search, plans: Sequence[Plan]) -> Iterator[tuple[Plan, Layout]]:
    """The plans as layouts, those that the run file admits."""
    from shoal.train.setup import fit

    for one in plans:
        with suppress(ShoalError):
            layout = Layout.parse(search.line(one))
            yield one, fit(config, layout, layout.ranks)


def peak_of(config: Config, layout: Layout, limit: int | None = None) -> int:
    """The bytes that the rank which holds most has on its device, by its own code: one rank of each stage is run dry,
    of many stages those of the ends, for all other ranks of a stage hold no more. The first above ``limit`` is enough.
    """
    from shoal.mesh import Grid
    from shoal.train.dryrun import dryrun

    grid, most = Grid(layout.axes), 0
    stages = range(layout.pp) if layout.pp <= 4 else (0, layout.pp - 1, 1, layout.pp - 2)
    for stage in stages:
        most = max(most, dryrun(config, layout, grid.rank({**grid.coords(0), "pp": stage})).peak_bytes)
        if limit is not None and most > limit:
            break
    return most


def _tell(choice: Choice, search: Search, machines: Machines, budget: float, *, stated: bool) -> None:
    from shoal.plan import explain

    plan, cluster = choice.plan, machines.cluster
    console.print(f"auto: [bold]{escape(str(choice.layout))}[/] on {cluster.ranks} ranks ({machines.source})")
    kept = (
        f"{size_text(choice.peak)} on the rank that holds most, by its own code run dry, of {size_text(budget * _GIB)}"
    )
    console.print(f"  predicted: {plan.estimate.step_s:.3g} s a step; {kept}{' allowed' if stated else ''}")
    console.print(f"  why: {explain.binding(plan, search.memory.room / _GIB)}")
    for other in choice.others[:2]:
        console.print(f"  next: {escape(search.line(other))}, {explain.lost(other, plan)}")
    if choice.too_large:
        layout, peak = choice.too_large[0]
        more = f", as would {len(choice.too_large) - 1} more" * (len(choice.too_large) > 1)
        console.print(f"  faster, but too large: {escape(str(layout))} would hold {size_text(peak)}{more}")
