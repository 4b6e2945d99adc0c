"""GPipe (Huang et al. 2019, 1811.06965): all forward passes, then all backward passes."""

from __future__ import annotations

from shoal.pipeline.program import Act, Op, Program, Programs


def gpipe(ranks: int, micro_batches: int) -> Programs:
    """One stage a rank. Every rank keeps the activations of all micro-batches."""
    return tuple(
        Program(
            (r,), micro_batches, tuple(Act(op, r, b) for op in (Op.FORWARD, Op.BACKWARD) for b in range(micro_batches))
        )
        for r in range(ranks)
    )
