"""PipeDream-2BW (Narayanan et al. 2021, 2006.09503): 1F1B without end, an update a batch, two versions of the weights.

The update of a batch has slack: the first forward pass that needs it is that of the batch after the next. So it comes
right before that, and the norm over all ranks travels while they compute. Clipping and tied weights are exact, and no
rank waits.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.pipeline.program import PASSES, Act, Op, Program, Programs
from shoal.pipeline.schedules.pipedream import without_flush


def two_bw(ranks: int, micro_batches: int, steps: int) -> Programs:
    """A stream of ``steps`` batches of ``micro_batches`` each, then its drain. One stage a rank.

    A forward pass uses the newest weights, and its backward pass the same. So on every rank the gradients of batch t
    are those of the weights before the last update: W^(t+1) = W^(t) − u(∇f(W^(t−1))), where W^(−1) is W^(0).

    ``micro_batches`` is at least ranks − 1: with fewer, a batch would not have ended where the update that ends it is
    needed.
    """
    assert micro_batches >= max(1, ranks - 1)
    return tuple(
        Program((r,), micro_batches * steps, tuple(_order(r, ranks - 1 - r, micro_batches, steps)))
        for r in range(ranks)
    )


def _order(stage: int, ahead: int, micro_batches: int, steps: int) -> Iterator[Act]:
    last = micro_batches * (steps - 1)
    normed_in = -1  # passes until the norm of the batch that was reduced last
    for act in without_flush(stage, ahead, micro_batches, steps):
        yield act
        number = act.micro_batch
        if act.op is Op.BEGIN and number >= 2 * micro_batches:
            yield Act(Op.UPDATE, micro_batch=number - 2 * micro_batches)
        elif act.op is Op.DRAIN and steps > 1:
            yield Act(Op.UPDATE, micro_batch=last - micro_batches)
        normed_in -= act.op in PASSES
        if act.op is Op.BACKWARD and (number + 1) % micro_batches == 0:
            reduced = number + 1 - micro_batches
            yield Act(Op.REDUCE, stage, reduced)
            normed_in = micro_batches - ahead  # half of the passes before the update
        if normed_in == 0 and reduced < last:
            yield Act(Op.NORM, micro_batch=reduced)
            normed_in = -1
    yield Act(Op.NORM, micro_batch=last)
    yield Act(Op.UPDATE, micro_batch=last)
