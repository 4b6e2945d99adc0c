"""A step of ranks that share fewer cores than they are: each pass runs at its share of them.

A rank that waits for another leaves its core to those that work, so a pipeline's bubble costs less than on devices of
their own, and more ranks do not make a step shorter than all its work over all cores.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.plan import clock


def length(
    schedule: str,
    ranks: int,
    count: int,
    chunks: int,
    costs: Sequence[Sequence[float]],
    transfer: float,
    cores: float,
) -> float:
    """How long all passes take, as :func:`shoal.plan.clock.length` says it of ranks with cores of their own; ``cores``
    counts those that there are for each of the ``ranks`` of a pipeline that works with all its replicas at once.

    Raises nothing: what it is called with has been admitted.
    """
    flat = [x for forward, inputs, weights in costs for x in (forward, inputs, weights, inputs + weights)]
    if ranks == 1:
        return sum(count * (flat[4 * s] + flat[4 * s + 3]) for s in range(chunks)) / min(1.0, cores)
    order = clock.order(schedule, ranks, count, chunks)
    queues: list[list[int]] = [[] for _ in range(ranks)]
    for place, (rank, *_) in enumerate(order.steps):
        queues[rank].append(place)
    ready = [0.0] * len(order.steps)
    """When what a pass has made is there; a pass that has not ended is not in ``ended``."""
    ended = [False] * len(order.steps)
    at = [0] * ranks
    left = [0.0] * ranks
    """Of the pass that a rank is in."""
    busy: set[int] = set()
    now = 0.0
    while True:
        soon = float("inf")
        for rank in range(ranks):
            if rank in busy or at[rank] == len(queues[rank]):
                continue
            _, cost, waits, cross = order.steps[queues[rank][at[rank]]]
            if waits >= 0 and not ended[waits]:
                continue
            start = ready[waits] + (transfer if cross else 0.0) if waits >= 0 else now
            if start <= now:
                busy.add(rank)
                left[rank] = flat[cost]
            else:
                soon = min(soon, start)
        if not busy and soon == float("inf"):
            return now
        speed = min(1.0, cores / len(busy)) if busy else 1.0
        until = min([soon, *(now + left[rank] / speed for rank in busy)])
        for rank in sorted(busy):
            left[rank] -= (until - now) * speed
            if left[rank] <= 1e-12:
                place = queues[rank][at[rank]]
                ended[place], ready[place] = True, until
                at[rank] += 1
                busy.discard(rank)
        now = until
