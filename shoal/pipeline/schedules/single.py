"""No pipeline: a pipeline of one stage, which accumulates gradients over its micro-batches."""

from __future__ import annotations

from shoal.pipeline.program import Act, Op, Program, Programs


def accumulate(micro_batches: int) -> Programs:
    """F 0, B 0, F 1, B 1, … so that one micro-batch's activations are alive at a time."""
    passes = [Act(op, 0, b) for b in range(micro_batches) for op in (Op.FORWARD, Op.BACKWARD)]
    return (Program((0,), micro_batches, tuple(passes)),)
