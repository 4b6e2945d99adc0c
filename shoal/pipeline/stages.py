"""How the layers of a model are cut into pipeline stages.

The slowest stage sets the pace: a step takes about (micro-batches + ranks − 1) times its passes. So the largest cost
is what to minimise; and likewise with memory, of which the rank that needs most decides whether a model fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise, permutations
from math import inf
from typing import Literal

from shoal.errors import LayoutError, setting
from shoal.pipeline.layer_costs import LayerCosts, by_stage
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Program, Programs, placement
from shoal.pipeline.simulate import Costs, peak


def cut(costs: Sequence[float], stages: int, blocks: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layers of each stage: consecutive ranges that cover ``range(len(costs))``, none empty.

    ``costs`` are those of the layers, in any unit, the first (the embedding) and the last (the head) included. The
    largest sum of costs in a stage is as small as it can be; every stage has a layer that is neither first nor last,
    where there are enough of them. With ``blocks`` it has as many of these as that says.

    Raises :class:`LayoutError` when there are more stages than layers, or ``blocks`` do not fit the layers.
    """
    layers = len(costs)
    _check_enough(layers, stages)
    if blocks is None:
        return _evenly(costs, stages, _places(layers, stages))
    _check(blocks, layers - 2, stages)
    inner = [0, *accumulate(blocks)]
    return _ranges([0, *(1 + end for end in inner[1:-1]), layers])


def balanced(
    costs: LayerCosts,
    passes: Sequence[Program],
    by: Literal["time", "memory"] = "time",
    *,
    states: Sequence[float] = (),
    ends: bool = True,
) -> tuple[range, ...]:
    """The layers of each stage of the ``passes`` of all ranks, cut by what they cost.

    By time, the stage that takes longest takes as little as it can. By memory, the rank that needs most needs as little
    as it can: what its passes hold at their peak, and of model states (weights, gradients, moments and what else there
    is) its ``states`` bytes a byte of its parameters, which count as nothing where they are not given; among such cuts,
    time decides. That is exact where each rank has one stage; else it is the best that moving layers from stage to
    stage leads to. ``ends`` says that the first and the last layer are no blocks (the embedding and the head): they go
    with the blocks beside them, where there are enough.

    Raises :class:`LayoutError` when there are more stages than layers.
    """
    home = placement(passes)
    stages = len(home)
    _check_enough(len(costs), stages)
    places = _places(len(costs), stages, ends)
    time = [sum(each) for each in zip(costs.forward, costs.input_gradient, costs.weight_gradient, strict=True)]
    by_time = _evenly(time, stages, places)
    if by == "time":
        return by_time
    total = [0.0, *accumulate(time)]
    memory = _Needs(costs, lower(passes), states or (0.0,) * len(passes))
    first = _ranges(_balance(stages, places, memory.of_stage, memory.least))
    if stages == len(passes):
        most = memory.of_ranks(first)[0]

        def within(stage: int, start: int, stop: int) -> float:
            fits = memory.least(stage, start, stop) <= most and memory.of_stage(stage, start, stop) <= most
            return total[stop] - total[start] if fits else inf

        return _ranges(_balance(stages, places, within, lambda _, start, stop: total[stop] - total[start]))
    found = min((_settle(start, places, memory.of_ranks) for start in (by_time, first)), key=memory.of_ranks)
    most = memory.of_ranks(found)[0]

    def times(cut: Sequence[range], limit: float) -> list[float]:
        taken = sorted((total[one.stop] - total[one.start] for one in cut), reverse=True)
        return taken if taken[0] <= limit and memory.of_ranks(cut, most)[0] <= most else [inf]

    return _settle(found, places, times)


class _Needs:
    """What ranks need for their activations and model states.

    Going through a rank's program takes a while. :meth:`least` does not, and is not much less: the activations of the
    micro-batches that are under way at once.
    """

    def __init__(self, costs: LayerCosts, programs: Programs, states: Sequence[float]) -> None:
        self._costs, self._programs, self._states, self._home = costs, programs, states, placement(programs)
        self._of_rank = cache(self._rank)
        none = (0.0,) * len(self._home)
        self._under_way = [
            peak(programs, rank, Costs(none, none, none, held=(*none[:stage], 1.0, *none[stage + 1 :]), kept=none))
            for stage, rank in enumerate(self._home)
        ]
        common = [0, *(costs.of("common", layer) for layer in range(len(costs) - 1))]
        self._held = [0, *accumulate(held - twice for held, twice in zip(costs.held, common, strict=True))]
        self._parameters = [0, *accumulate(costs.of("parameters", layer) for layer in range(len(costs)))]

    def of_stage(self, stage: int, start: int, stop: int) -> float:
        """A rank that has one stage, of the layers from ``start`` to ``stop``."""
        return self._of_rank(self._home[stage], ((stage, start, stop),))

    def least(self, stage: int, start: int, stop: int) -> float:
        """What its rank needs for a stage at least."""
        weights = self._states[self._home[stage]] * (self._parameters[stop] - self._parameters[start])
        return self._under_way[stage] * (self._held[stop] - self._held[start]) + weights

    def of_ranks(self, stages: Sequence[range], limit: float = inf) -> list[float]:
        """All, the one that needs most first. Where that is more than ``limit``, no more is told."""
        held: list[list[tuple[int, int, int]]] = [[] for _ in self._programs]
        for stage, (layers, rank) in enumerate(zip(stages, self._home, strict=True)):
            held[rank].append((stage, layers.start, layers.stop))
        # Of a rank with several stages, at different moments: so each by itself.
        if max(self.least(*one) for mine in held for one in mine) > limit:
            return [inf]
        needs = []
        for rank, mine in enumerate(held):
            needs.append(self._of_rank(rank, tuple(mine)))
            if needs[-1] > limit:
                return [inf]
        return sorted(needs, reverse=True)

    def _rank(self, rank: int, held: tuple[tuple[int, int, int], ...]) -> float:
        """Of stages elsewhere, the last layer of the one before is all that matters."""
        layers = [range(1)] * len(self._home)
        for stage, start, _ in held:
            layers[stage - 1] = range(max(start - 1, 0), max(start, 1))
        for stage, start, stop in held:
            layers[stage] = range(start, stop)
        parameters = sum(self._parameters[stop] - self._parameters[start] for _, start, stop in held)
        return peak(self._programs, rank, by_stage(self._costs, layers)) + self._states[rank] * parameters


def _check_enough(layers: int, stages: int) -> None:
    if not 0 < stages <= layers:
        raise LayoutError(setting("layout.pp", stages, f"more stages than the model's {layers} layers",
                                  f"use pp={layers} or fewer"))  # fmt: skip


def _check(blocks: Sequence[int], layers: int, stages: int) -> None:
    if len(blocks) != stages or min(blocks) < 1 or sum(blocks) != layers:
        raise LayoutError(setting("layout.pp layers", "/".join(map(str, blocks)),
                                  f"the model has {layers} blocks for {stages} stages",
                                  f"use {stages} numbers from 1 that add up to {layers}"))  # fmt: skip


def _places(layers: int, stages: int, ends: bool = True) -> list[int]:
    """Before which layers a stage may begin, and ``layers``. The ``ends`` belong to the blocks beside them."""
    apart = not ends or layers - 2 < stages
    return [0, *(range(1, layers) if apart else range(2, layers - 1)), layers]


def _ranges(ends: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def _evenly(costs: Sequence[float], stages: int, places: Sequence[int]) -> tuple[range, ...]:
    total = [0.0, *accumulate(costs)]

    def cost(_: int, start: int, stop: int) -> float:
        return total[stop] - total[start]

    return _ranges(_balance(stages, places, cost, cost))


_Cost = Callable[[int, int, int], float]
"""Of a part, from where to where."""


def _balance(parts: int, places: Sequence[int], cost: _Cost, least: _Cost) -> list[int]:
    """The ends of ``parts`` consecutive parts, from the first of ``places`` to the last. ``least`` is no more than the
    ``cost``, which is asked for no part that is seen to be dearer than needed.

    The largest cost is the least; among equals, the sum of squares decides, which keeps the other parts even; then the
    later parts are the longer, because earlier stages keep more activations.
    """
    first, *later = places
    # best[end]: (largest cost, sum of squares, ends) of the best way to cut what comes before `end`.
    spare = len(later) - parts
    best = {end: ((one := cost(0, first, end)), one**2, [first, end]) for end in later[: spare + 1]}

    def cheapest(part: int, end: int) -> tuple[float, float, list[int]]:
        found: tuple[float, float, list[int]] = (inf, inf, [])
        starts = [start for start in best if start < end]
        for bound, start in sorted((max(best[start][0], least(part, start, end)), start) for start in starts):
            if bound > found[0]:
                break
            (largest, squares, ends), last = best[start], cost(part, start, end)
            one = max(largest, last), squares + last**2, [*ends, end]
            found = min(found, one) if found[2] else one
        return found

    for part in range(1, parts):
        best = {end: cheapest(part, end) for end in later[part : part + spare + 1]}
    return best[places[-1]][2]


def _settle(
    cut: tuple[range, ...], places: Sequence[int], needs: Callable[[Sequence[range], float], list[float]]
) -> tuple[range, ...]:
    """What ``cut`` becomes by steps that each lower ``needs`` (the largest, then the next) by the most: a stage begins
    elsewhere, or what lies between two ``places`` goes from one stage to another, and those between them shift. What
    needs more than a number that is given, is told to need anything more."""
    at = [*(places.index(one.start) for one in cut), len(places) - 1]
    least = needs(cut, inf)
    while True:
        best, then = least, at
        shifted = (
            [end - (source < stage <= to) + (to < stage <= source) for stage, end in enumerate(at)]
            for source, to in permutations(range(len(cut)), 2)
        )
        begun = (
            [*at[:stage], end, *at[stage + 1 :]]
            for stage in range(1, len(cut))
            for end in range(at[stage - 1] + 1, at[stage + 1])
        )
        for one in chain(shifted, begun):
            if len(set(one)) == len(one):
                best, then = min((best, then), (needs(_ranges([places[end] for end in one]), best[0]), one))
        if best == least:
            return _ranges([places[end] for end in at])
        least, at = best, then
