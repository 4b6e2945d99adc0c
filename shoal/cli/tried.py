"""Plans that run for a few steps on the devices of this machine, and the fastest of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape
from rich.table import Table

from shoal.cli import here
from shoal.cli.common import console, progress_bar
from shoal.config import Config
from shoal.errors import ConfigError, setting
from shoal.layout import Layout

if TYPE_CHECKING:
    from shoal.plan.search import Plan, Search

_ROUNDS = 2
"""Each plan runs so often, in turns: a machine's speed drifts."""
_STEPS = 5
_CROWD = 4
"""Ranks that one core may have."""


class Tried(NamedTuple):
    """A plan that ran."""

    layout: str
    predicted_s: float
    step_s: float
    """The median of its steps in the faster round."""
    peak_gib: float
    """Of the rank that held most."""


def check_startable(config: Config, count: int, ranks: int) -> None:
    """Raises :class:`ConfigError` where this machine does not run that many ``ranks``."""
    from shoal.cli.auto import ranks_here

    most = ranks_here(config) * (1 if config.run.device != "cpu" else _CROWD)
    if ranks > most:
        problem = f"the cluster has {ranks:,} ranks, and this machine runs at most {most}"
        raise ConfigError(setting("--measure", count, problem, f"leave it out, or use --cluster {most}x{here.NAME}"))


def measured_plans(config: Config, search: Search, plans: list[Plan], count: int, *, quiet: bool) -> list[Tried]:
    """The best ``count`` of the plans that the run file admits, fastest first as they ran. One whose memory, by its own
    code run dry, is above the device's is passed over."""
    from shoal.cli.auto import layouts_of, peak_of
    from shoal.train.pool import Pool
    from shoal.train.trial import Trial, trial

    limit = round(search.job.cluster.device.memory_gib * 2**30)
    fitting: list[tuple[Plan, Layout]] = []
    for plan, layout in layouts_of(config, search, plans):
        if len(fitting) < count and peak_of(config, layout, limit) <= limit:
            fitting.append((plan, layout))
    ranks = search.job.cluster.ranks
    seen: list[list[Trial]] = [[] for _ in fitting]
    threads = max(1, here.cores() // ranks)
    with progress_bar(quiet=quiet) as progress, Pool(ranks, threads=threads) as pool:
        for turn in range(_ROUNDS):
            for at, (_, layout) in enumerate(fitting):
                progress("running plans", turn * len(fitting) + at, _ROUNDS * len(fitting))
                seen[at].append(trial(config, layout, pool, _STEPS))
        progress("running plans", 1, 1)
    tried = [
        Tried(
            str(layout),
            plan.estimate.step_s,
            min(one.step_s for one in trials),
            max(one.peak_bytes for one in trials) / 2**30,
        )
        for (plan, layout), trials in zip(fitting, seen, strict=True)
    ]
    return sorted(tried, key=lambda one: one.step_s)


def show_tried(tried: list[Tried]) -> None:
    """A table of what ran."""
    if not tried:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", title="measured on this machine", title_justify="left")
    for name in ("step s", "predicted", "GiB"):
        table.add_column(name, justify="right")
    table.add_column("layout", overflow="fold")
    for one in tried:
        table.add_row(f"{one.step_s:.3f}", f"{one.predicted_s:.3f}", f"{one.peak_gib:.3f}", escape(one.layout))
    console.print()
    console.print(table)
