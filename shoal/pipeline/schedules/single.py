"""No pipeline: a pipeline of one stage, which accumulates gradients over its micro-batches."""

from __future__ import annotations

from shoal.pipeline.program import Act, Op, Program


def accumulate(micro_batches: int) -> Program:
    """F 0, B 0, F 1, B 1, … so that one micro-batch's activations are alive at a time; then one update."""
    passes = [Act(op, 0, b) for b in range(micro_batches) for op in (Op.FORWARD, Op.BACKWARD)]
    return Program((0,), micro_batches, (*passes, Act(Op.REDUCE, 0), Act(Op.NORM), Act(Op.UPDATE)))


def forward_only(micro_batches: int) -> Program:
    """F 0, F 1, …: evaluation."""
    return Program((0,), micro_batches, tuple(Act(Op.FORWARD, 0, b) for b in range(micro_batches)))
