"""Who holds which block: every weight and optimizer state on every rank of a layout, from one process that is none.

The answer is the engine's own. The same functions cut stages, place parameters, build buckets and divide them; only
tensors without memory are laid out, so neither a model nor a world can be too large to look at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from shoal.build import away_of, costs_of, held_units, homes_of, interpreter_of, sharing_of, stages_of
from shoal.config import Optimizer
from shoal.data_parallel.buckets import Bucket, build_buckets
from shoal.layout import Layout
from shoal.local import LocalParameter, held_at, logical_parameters
from shoal.mesh import Grid
from shoal.model.task import Task
from shoal.optim.treatment import Treatments
from shoal.placement import Box, Division, Fragment, Holders
from shoal.report.where import bytes_by_place

Kind = Literal["weight", "state"]
MANY = 64
KINDS: tuple[Kind, ...] = ("weight", "state")
ADAMW = Optimizer()


@dataclass(frozen=True)
class Share:
    """What all of ``ranks`` hold of a tensor: ``boxes`` of it, one or, of a flat range, a few."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        return sum(prod(stop - start for start, stop in box) for box in self.boxes)


@dataclass(frozen=True)
class Held:
    """A logical weight of full ``shape`` on the ranks at one ``place`` of the pipeline, which use it first in layer
    ``unit``.

    ``shares`` are disjoint, in the order of their first elements: of the weight, and of each of its optimizer states.
    """

    weight: str
    label: str
    """The name within the unit, without what goes without saying."""
    shape: tuple[int, ...]
    place: int
    unit: int
    shares: tuple[Share, ...]
    states: tuple[Share, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of(self, kind: Kind) -> tuple[Share, ...]:
        """Who holds what of the weight, or of each of its states."""
        return self.shares if kind == "weight" else self.states


@dataclass(frozen=True)
class Section:
    """``units`` in a row whose tensors are held alike, and those of the first of them."""

    units: tuple[int, ...]
    held: tuple[Held, ...]

    @property
    def updaters(self) -> tuple[int, ...] | None:
        """The ranks that have all optimizer states between them, each of all that it holds of the weights, where these
        are the same ranks for every tensor."""
        entire = all(
            [share.boxes for share in one.states] == [share.boxes for share in one.shares]
            and sum(share.numel for share in one.states) == one.numel
            for one in self.held
        )
        ranks = {tuple(sorted({rank for share in one.states for rank in share.ranks})) for one in self.held}
        return ranks.pop() if entire and len(ranks) == 1 else None


@dataclass(frozen=True)
class Ownership:
    """A layout of a model: the names and costs of its ``units`` (layers), the units of each stage, the place on the
    pipeline of each stage (``homes``; a place may have several), who holds what.

    ``ranks`` are those that were asked about; shares name no others.
    """

    layout: Layout
    ranks: tuple[int, ...]
    units: tuple[str, ...]
    costs: tuple[int, ...]
    stages: tuple[range, ...]
    homes: tuple[int, ...]
    held: tuple[Held, ...]
    bytes: Mapping[int, Mapping[str, int]]
    """By rank and place (see :mod:`shoal.report.where`): what it keeps of model states."""

    @cached_property
    def grid(self) -> Grid:
        return Grid(self.layout.axes)

    @property
    def is_part(self) -> bool:
        """Whether there are ranks that were not asked about."""
        return len(self.ranks) < self.grid.size

    @property
    def elements(self) -> int:
        """The size of the model, a weight that several places hold counted once."""
        return sum({one.weight: one.numel for one in self.held}.values())

    @property
    def common_size(self) -> int:
        """The size that most dims of matrices have, which is the hidden one."""
        return Counter(n for one in self.held if len(one.shape) > 1 for n in one.shape).most_common(1)[0][0]

    @property
    def replicas(self) -> int:
        """Groups of ranks that each have the whole model between them, were nothing divided over them."""
        return self.layout.dp * self.layout.cp

    def stages_at(self, place: int) -> tuple[int, ...]:
        """The stages of one place on the pipeline."""
        return tuple(stage for stage, home in enumerate(self.homes) if home == place)

    def units_at(self, place: int) -> list[int]:
        """The units of its stages, ascending."""
        return held_units(self.stages, self.homes)[place]

    def ranks_at(self, place: int) -> tuple[int, ...]:
        """The ranks that hold its stages."""
        return tuple(rank for rank in self.ranks if self.grid.coords(rank)["pp"] == place)

    def cost_share(self, place: int) -> float:
        """The part of the whole model's cost that its stages have."""
        return sum(self.costs[unit] for unit in self.units_at(place)) / sum(self.costs)

    def count(self, rank: int, kind: Kind) -> int:
        """The elements that ``rank`` holds of weights, or of each optimizer state."""
        return self._counts[kind][rank]

    @cached_property
    def _counts(self) -> dict[Kind, Counter[int]]:
        found: dict[Kind, Counter[int]] = {kind: Counter() for kind in KINDS}
        for one, kind in product(self.held, KINDS):
            for share in one.of(kind):
                found[kind].update(dict.fromkeys(share.ranks, share.numel))
        return found

    def sections(self, place: int, kind: Kind) -> list[Section]:
        """The units at a place, those in a row together where they differ in nothing but their number."""
        units = groupby((one for one in self.held if one.place == place), key=lambda one: one.unit)
        each = [(unit, tuple(held)) for unit, held in units]
        found = []
        for _, run in groupby(each, key=lambda item: [(one.label, one.shape, one.of(kind)) for one in item[1]]):
            alike = list(run)
            found.append(Section(tuple(unit for unit, _ in alike), alike[0][1]))
        return found

    def as_json(self) -> list[dict[str, Any]]:
        """One object for each box that ranks at a place hold, with the first stage there that uses it."""
        stage_of = {unit: stage for stage, units in enumerate(self.stages) for unit in units}
        return [
            {
                "weight": one.weight, "shape": one.shape, "kind": kind, "box": box,
                "ranks": share.ranks, "stage": stage_of[one.unit],
            }
            for one in self.held
            for kind in KINDS
            for share in one.of(kind)
            for box in share.boxes
        ]  # fmt: skip


def shown(layout: Layout) -> tuple[int, ...]:
    """The ranks that a person is shown: all, or of more than :data:`MANY` those of the first replica."""
    grid = Grid(layout.axes)
    if grid.size <= MANY:
        return tuple(range(grid.size))
    return tuple(grid.rank(place) for place in grid.vary(grid.coords(0), ("pp", *layout.tensor_names)))


def ownership(
    task: Task, layout: Layout, ranks: Sequence[int] | None = None, optimizer: Optimizer = ADAMW
) -> Ownership:
    """Who holds what of ``task``'s module, of full shapes, under a ``layout`` that fits it; all ``ranks``, unless told.

    Raises :class:`~shoal.errors.LayoutError` where there are more stages than layers.
    """
    layers, roles = task.layers(), task.roles
    stages, homes, sharing = stages_of(layout, layers, roles), homes_of(layout), sharing_of(layout)
    units_of, interpreter, grid = held_units(stages, homes), interpreter_of(layout, roles), Grid(layout.axes)
    asked = tuple(range(grid.size)) if ranks is None else tuple(ranks)
    found: dict[tuple[int, str], _Found] = {}
    places: dict[int, Mapping[str, int]] = {}
    sharing = replace(sharing, masters=optimizer.rounding == "nearest", away=away_of(layout))
    parameters = logical_parameters(task.module, layers, roles, interpreter, grid, units_of)
    for rank in asked:
        coords = grid.coords(rank)
        held = [_shell(one) for one in held_at(coords, parameters, units_of)]
        for one in held:
            for piece in one.placement.pieces:
                found.setdefault((coords["pp"], piece.name), _Found(piece.name, piece.shape, one.unit))
        cut = sharing.divider(grid, rank)
        buckets = build_buckets(held, cut, Treatments(optimizer), sharing.cap_bytes)
        places[rank] = bytes_by_place(buckets, sharing)
        for kind, fragment in _fragments(held, buckets, cut, keep_params=sharing.keep_params):
            if fragment.piece.numel:
                found[coords["pp"], fragment.piece.name].holders(kind)[fragment.piece.box].append(rank)
    names = tuple(name for name, _ in layers)
    everything = [each.as_held(place, names) for (place, _), each in found.items()]
    everything.sort(key=lambda one: (one.place, one.unit))
    costs = tuple(costs_of(layers, roles))
    return Ownership(layout, asked, names, costs, stages, homes, tuple(everything), places)


class _Found:
    """What has been found of one weight at one place of the pipeline."""

    def __init__(self, name: str, shape: tuple[int, ...], unit: int) -> None:
        self.name, self.shape, self.unit = name, shape, unit
        self.of_weight: dict[Box, list[int]] = defaultdict(list)
        self.of_states: dict[Box, list[int]] = defaultdict(list)

    def holders(self, kind: Kind) -> dict[Box, list[int]]:
        return self.of_weight if kind == "weight" else self.of_states

    def as_held(self, place: int, names: Sequence[str]) -> Held:
        label = self.name.removeprefix(f"{names[self.unit]}.").removesuffix(".weight")
        shares = _gather(self.of_weight), _gather(self.of_states)
        return Held(self.name, label, self.shape, place, self.unit, *shares)


def _gather(holders: dict[Box, list[int]]) -> tuple[Share, ...]:
    boxes: dict[tuple[int, ...], list[Box]] = defaultdict(list)
    for box in sorted(holders):
        boxes[tuple(holders[box])].append(box)
    return tuple(Share(ranks, tuple(those)) for ranks, those in boxes.items())


def _shell(one: LocalParameter) -> LocalParameter:
    """The parameter in the shape that a rank has of it, without memory."""
    local = torch.empty(one.placement.shape, dtype=one.parameter.dtype, device="meta")
    return replace(one, parameter=nn.Parameter(local))


def _fragments(
    held: Sequence[LocalParameter],
    buckets: Sequence[Bucket],
    cut: Callable[[Holders], Division],
    *,
    keep_params: bool,
) -> Iterator[tuple[Kind, Fragment]]:
    """What a rank keeps of weights and of optimizer states: ZeRO divides the states, and from stage 3 on the weights
    too, then a unit at a time."""
    if keep_params:
        yield from (("weight", part) for one in held for part in one.fragments("weight", one.parameter))
    for bucket in buckets:
        own = torch.empty(bucket.high - bucket.low, device="meta")
        for part in bucket.own_fragments("state", own, cut):
            yield "state", part
            if not keep_params:
                yield "weight", part
