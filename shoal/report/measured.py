"""A pipeline schedule with what the layers of a model were measured to take: on the clock, in bytes, and as the layout
that makes the most of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join
from typing import Any, Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from torch import nn

from shoal.build import DTYPES, Shares, passes_of, shares_of, sharing_of, stages_of
from shoal.config import Optimizer
from shoal.layout import Layout, kinds
from shoal.model.roles import RoleTable
from shoal.optim.treatment import state_names
from shoal.pipeline.layer_costs import LayerCosts, by_stage
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Programs
from shoal.pipeline.simulate import Costs, even, simulate
from shoal.pipeline.stages import balanced
from shoal.pipeline.versions import live_versions
from shoal.report.pipeline import PassTimes, Pipeline, on_the_clock, shown_of
from shoal.report.pipeline_terminal import Timeline
from shoal.report.pipeline_words import by_rank, figures, headline, times_words
from shoal.report.wording import units_text
from shoal.sizes import Unit, unit_for

Balance = Literal["time", "memory"]

_MS = 1e3
_DIGITS = 3
"""Of a time in a layout: more is noise."""


_OTHERS = {1: "1f1b", 2: "zb-v"}
"""By the stages a rank: what a list order may be compared with. It takes any number of micro-batches."""


class Asked(NamedTuple):
    """What a command was given about the model and its layout, as it was given."""

    layout: str | None = None
    overrides: Sequence[str] = ()
    balance: str | None = None
    transfer: float | None = None


@dataclass(frozen=True)
class Measured:
    """A schedule over the stages of a model. Seconds and bytes are those of a micro-batch."""

    layout: Layout
    """With the blocks of each stage and, for ``list``, the times that its order is made for."""
    names: tuple[str, ...]
    """Of the layers."""
    layers: LayerCosts
    stages: tuple[range, ...]
    of_stages: Costs
    seen: Pipeline
    """On a clock of milliseconds."""
    peak_bytes: tuple[float, ...]
    """By rank: of activations, gradients of activations, and what waits to be sent or taken in."""

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints: what a schedule has by itself, with times in milliseconds, the layout, and what was
        measured."""
        costs, home = self.of_stages, self.seen.home
        stages = [
            {"rank": home[at], "layers": [self.names[unit] for unit in units]} | _of(costs, at)
            for at, units in enumerate(self.stages)
        ]
        layers = [
            {"layer": name} | _of(self.layers, at) | {"output_bytes": self.layers.output[at]}
            for at, name in enumerate(self.names)
        ]
        return self.seen.as_json() | {
            "unit": "ms", "layout": str(self.layout), "peak_bytes": list(self.peak_bytes),
            "stages": stages, "layers": layers,
        }  # fmt: skip


def with_measured(
    layout: Layout,
    layers: Sequence[tuple[str, nn.Module]],
    roles: RoleTable,
    costs: LayerCosts,
    optimizer: Optimizer,
    *,
    by: Balance = "time",
    transfer: float = 0.0,
) -> Measured:
    """The schedule of ``layout`` over the ``layers`` of a model, cut as the layout says or else balanced ``by`` time or
    memory, what ``optimizer`` needs included; ``transfer`` is how many seconds a tensor takes from rank to rank.

    What is shown of ``list`` is the order that the layout makes on any rank, from rounded times that stages share by
    what their matrices have; how long it takes is measured, stage by stage.
    """
    if kinds.SCHEDULES[layout.schedule].made_to_measure:
        times = _times(costs, layout.pp, transfer)
        layout = replace(layout, list_times=tuple(float(f"{time:.{_DIGITS}g}") for time in times))
    if layout.stage_layers is None and layout.stages > 1:
        passes = _passes(layout)
        cut = balanced(costs, passes, by, states=states_of(layout, optimizer, passes), ends=bool(roles))
        layout = replace(layout, stage_layers=_blocks(cut, len(layers) if roles else None))
    stages = stages_of(layout, layers, roles)
    of_stages = by_stage(costs, stages, transfer)
    programs = _passes(layout, shares_of(layout, layers, roles, stages))
    times = _times(of_stages, layout.pp, transfer)
    seen = on_the_clock(layout.schedule, layout.mb, times, programs, _counting(of_stages, layout))
    peaks = simulate(lower(programs), of_stages).peaks
    names = tuple(name for name, _ in layers)
    return Measured(layout, names, costs, stages, of_stages, seen, peaks)


def states_of(layout: Layout, optimizer: Optimizer, passes: Programs) -> tuple[float, ...]:
    """By rank of the ``passes``: bytes of weights and their versions, of gradients, masters and moments in a step, for
    a byte of the weights that it has: 4 in float32 with AdamW. All are counted as hidden matrices, of which the
    optimizer that the run names keeps its states.

    What ZeRO 2 and 3 divide is whole while a stage has work, beside the rank's own part.
    """
    sharing = sharing_of(layout)
    size, part = DTYPES[layout.dtype].itemsize, 1 / sharing.size
    wide = max(size, DTYPES["float32"].itemsize)
    gradient = size if sharing.half_grads else wide
    gradients = gradient * (1 + (layout.schedule == "2bw"))  # the next batch adds up in a second set
    own = wide * len(state_names(optimizer, optimizer.name))
    master = wide if optimizer.rounding == "nearest" else size
    if sharing.versions or master != size:
        own += master
    if sharing.size > 1:
        own += (not sharing.keep_params) * size + (not sharing.keep_grads) * gradient
    return tuple((live_versions(one) * size + gradients + own * part) / size for one in passes)


def measured_report(found: Measured, run: Path) -> RenderableType:
    """Everything that ``shoal schedule --run`` prints, but what to do next."""
    seen = found.seen
    return Group(
        f"[bold]{escape(headline(seen))}[/], with the layers of {escape(str(run))} as measured",
        f"[dim]{escape(times_words(seen))}; milliseconds, the mean of the ranks[/]",
        "",
        Timeline(seen),
        "",
        _stages(found),
        "",
        _figures(found),
    )


def to_do_with(found: Measured, run: Path, line: str, asked: Asked) -> Iterator[tuple[str, str]]:
    """(what for, command): ``line`` is the layout that was found, as a command takes it beside ``run``."""
    seen, of_run = found.seen, [str(run), *(word for one in asked.overrides for word in ("--set", one))]
    yield "train with it", join(["shoal", "train", *of_run, "--layout", line])
    other = _OTHERS.get(seen.chunks, "breadth-first") if seen.name == "list" else "list"
    words = ["-p", str(seen.ranks), "-m", str(seen.micro_batches)]
    if seen.chunks != kinds.SCHEDULES[other].chunks:
        words += ["-v", str(seen.chunks)]
    words += ["--run", *of_run]
    given = {"--layout": asked.layout, "--balance": asked.balance, "--transfer": asked.transfer}
    words += [word for option, value in given.items() if value is not None for word in (option, str(value))]
    yield "another schedule, measured as well", join(["shoal", "schedule", other, *words])


def _passes(layout: Layout, shares: Shares = ()) -> Programs:
    """Of a stream, with its beginning and its drain."""
    if layout.asynchronous:
        return shown_of(layout.schedule, layout.pp, layout.mb, layout.chunks)
    return passes_of(layout, shares)


def _blocks(stages: Sequence[range], layers: int | None) -> tuple[int, ...]:
    """How many blocks each stage has; of a model of ``layers``, the first and the last are none."""
    ends = () if layers is None else (0, layers - 1)
    return tuple(sum(unit not in ends for unit in stage) for stage in stages)


def _times(costs: LayerCosts | Costs, ranks: int, transfer: float) -> PassTimes:
    """What a rank takes on average, in milliseconds."""
    share = _MS / ranks
    forward, input_gradient, weight_gradient = map(sum, (costs.forward, costs.input_gradient, costs.weight_gradient))
    return PassTimes(share * forward, share * input_gradient, share * weight_gradient, _MS * transfer)


def _counting(costs: Costs, layout: Layout) -> Costs:
    """The same in milliseconds, with micro-batches of a whole rank as memory."""
    alike = even(layout.pp, layout.chunks)
    forward, input_gradient, weight_gradient = (
        tuple(_MS * time for time in times) for times in (costs.forward, costs.input_gradient, costs.weight_gradient)
    )
    return Costs(forward, input_gradient, weight_gradient, alike.held, alike.kept, _MS * costs.transfer)


def _of(costs: LayerCosts | Costs, at: int) -> dict[str, float]:
    return {
        "forward_ms": _MS * costs.forward[at],
        "input_gradient_ms": _MS * costs.input_gradient[at],
        "weight_gradient_ms": _MS * costs.weight_gradient[at],
        "held_bytes": costs.held[at],
        "kept_bytes": costs.kept[at],
    }


def _stages(found: Measured) -> RenderableType:
    table, unit = Table("stage", "rank", "layers", box=None, pad_edge=False, header_style="dim"), _unit(found)
    for head in ("F ms", "I ms", "W ms", f"held {unit.name}"):
        table.add_column(head, justify="right")
    for at, units in enumerate(found.stages):
        *times, held, _ = _of(found.of_stages, at).values()
        numbers = [*(f"{number:.3g}" for number in times), unit.of(held)]
        names = escape(units_text([found.names[unit] for unit in units]))
        table.add_row(str(at), str(found.seen.home[at]), names, *numbers)
    return table


def _figures(found: Measured) -> RenderableType:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value, what in figures(found.seen):
        table.add_row(name, f"[bold]{value}[/]", f"[dim]{escape(what)}[/]")
    unit = _unit(found)
    by = by_rank([round(peak / unit.size, 2) for peak in found.peak_bytes])
    what = f"{by}: activations and what is between passes, without weights, gradients and states"
    table.add_row(f"peak {unit.name}", f"[bold]{unit.of(max(found.peak_bytes))}[/]", f"[dim]{escape(what)}[/]")
    return table


def _unit(found: Measured) -> Unit:
    return unit_for(max(found.peak_bytes))
