"""ZB-H1 (Qi et al. 2024, 2401.10241): 1F1B whose weight gradients fill the drain, in the memory of its first rank."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.pipeline.program import Act, Op, Program, Programs


def zb_h1(ranks: int, micro_batches: int) -> Programs:
    """One stage a rank. Rank r puts its weight gradients off by r micro-batches, so that every rank keeps at most
    ``ranks`` of them. Any number of micro-batches will do."""
    return tuple(
        Program((r,), micro_batches, tuple(put_off(r, micro_batches, ahead=ranks - r, late=r))) for r in range(ranks)
    )


def put_off(stage: int, micro_batches: int, ahead: int, late: int) -> Iterator[Act]:
    """``ahead`` forward passes; then, for every input gradient, a weight gradient of ``late`` micro-batches before and
    a forward pass; then the weight gradients that are left."""
    ahead = min(ahead, micro_batches)
    for b in range(ahead):
        yield Act(Op.FORWARD, stage, b)
    for b in range(micro_batches):
        yield Act(Op.INPUT_GRADIENT, stage, b)
        if b >= late:
            yield Act(Op.WEIGHT_GRADIENT, stage, b - late)
        if ahead + b < micro_batches:
            yield Act(Op.FORWARD, stage, ahead + b)
    for b in range(max(micro_batches - late, 0), micro_batches):
        yield Act(Op.WEIGHT_GRADIENT, stage, b)
