"""How the layers of a model are cut into pipeline stages.

The slowest stage sets the pace: a step takes about (micro-batches + ranks − 1) times its passes. So the largest cost
is what to minimise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from shoal.errors import LayoutError, setting


def cut(costs: Sequence[float], stages: int, blocks: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layers of each stage: consecutive ranges that cover ``range(len(costs))``, none empty.

    ``costs`` are those of the layers, in any unit, the first (the embedding) and the last (the head) included. The
    largest sum of costs in a stage is as small as it can be; every stage has a layer that is neither first nor last,
    where there are enough of them. With ``blocks`` it has as many of these as that says.

    Raises :class:`LayoutError` when there are more stages than layers, or ``blocks`` do not fit the layers.
    """
    layers = len(costs)
    if not 0 < stages <= layers:
        raise LayoutError(setting("layout.pp", stages, f"more stages than the model's {layers} layers",
                                  f"use pp={layers} or fewer"))  # fmt: skip
    if blocks is not None:
        _check(blocks, layers - 2, stages)
        inner = [0, *accumulate(blocks)]
    elif layers - 2 >= stages:
        # The ends belong to the blocks beside them.
        joined = list(costs[1:-1])
        joined[0] += costs[0]
        joined[-1] += costs[-1]
        inner = _balance(joined, stages)
    else:
        return tuple(range(start, stop) for start, stop in pairwise(_balance(costs, stages)))
    ends = [0, *(1 + end for end in inner[1:-1]), layers]
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def _check(blocks: Sequence[int], layers: int, stages: int) -> None:
    if len(blocks) != stages or min(blocks) < 1 or sum(blocks) != layers:
        raise LayoutError(setting("layout.pp layers", "/".join(map(str, blocks)),
                                  f"the model has {layers} blocks for {stages} stages",
                                  f"use {stages} numbers from 1 that add up to {layers}"))  # fmt: skip


def _balance(costs: Sequence[float], parts: int) -> list[int]:
    """The ends of ``parts`` consecutive parts of ``costs``, from 0 to ``len(costs)``.

    The largest sum is the least; among equals, the sum of squares decides, which keeps the other parts even; then the
    later parts are the longer, because earlier stages keep more activations.
    """
    total = [0.0, *accumulate(costs)]
    # best[end]: (largest sum, sum of squares, ends) of the best way to cut what comes before `end`.
    best = {end: (total[end], total[end] ** 2, [0, end]) for end in range(1, len(costs) + 1)}
    for part in range(2, parts + 1):
        best = {
            end: min(
                (max(largest, last), squares + last**2, [*ends, end])
                for start, (largest, squares, ends) in best.items()
                if start < end
                for last in [total[end] - total[start]]
            )
            for end in range(part, len(costs) + 1)
        }
    return best[len(costs)][2]
