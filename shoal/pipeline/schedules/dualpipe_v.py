"""DualPipeV (DeepSeek-AI 2025; half of DualPipe, 2412.19437): two directions at a time, over stages in a V."""

from __future__ import annotations

from shoal.pipeline.program import Programs
from shoal.pipeline.schedules.vee import Vee, in_a_vee


def dualpipe_v(ranks: int, micro_batches: int) -> Programs:
    """Two stages a rank: rank r holds r and 2·ranks − 1 − r. In its steady state it takes a micro-batch forward through
    one and another backward through the other, in turn; every rank keeps 2·ranks + 1 chunks.

    The two of a turn are there to hide the communication of one under the work of the other. Here each gives its result
    away as soon as there is one: to wait for both would cost half a forward pass a rank.

    ``micro_batches`` is at least 2·ranks, which fill both directions.
    """
    assert micro_batches >= 2 * ranks
    return in_a_vee(ranks, micro_batches, 0, _write)


def _write(vee: Vee, rank: int, ranks: int, micro_batches: int) -> None:
    after = ranks - 1 - rank
    vee.add("F0", 2 * after)
    vee.add("F0 F1", rank + 1)
    vee.add("I1 W F1", after)
    vee.add("F0 B1 F1 B0", micro_batches - 2 * ranks + rank + 1)
    vee.add("B1 F1 B0", after)
    # Weights' gradients are put off from half way through the drain on.
    drain = "B1 B0 " * (rank + 1)
    vee.add(drain[: 3 * (rank + 1)])
    vee.add(drain[3 * (rank + 1) :].replace("B", "I"))
    vee.add("W I0", after)
    vee.add("W", rank + 1)
