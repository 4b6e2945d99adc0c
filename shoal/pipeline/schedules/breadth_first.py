"""Breadth-first (Lamy-Poirier 2022, 2211.05953): all micro-batches through one stage, then through the next."""

from __future__ import annotations

from shoal.pipeline.program import Act, Op, Program, Programs


def breadth_first(ranks: int, micro_batches: int, chunks: int = 2) -> Programs:
    """``chunks`` stages a rank: rank r holds r, r + ranks, r + 2·ranks, …

    It keeps the activations of all micro-batches, and uses each stage's weights in one run forward and one backward:
    under ZeRO-3 they need be gathered but twice a step. Any number of micro-batches will do.
    """
    return tuple(
        Program(stages := tuple(range(r, ranks * chunks, ranks)), micro_batches, _order(stages, micro_batches))
        for r in range(ranks)
    )


def _order(stages: tuple[int, ...], micro_batches: int) -> tuple[Act, ...]:
    forward = [Act(Op.FORWARD, stage, b) for stage in stages for b in range(micro_batches)]
    backward = [Act(Op.BACKWARD, stage, b) for stage in reversed(stages) for b in range(micro_batches)]
    return (*forward, *backward)
