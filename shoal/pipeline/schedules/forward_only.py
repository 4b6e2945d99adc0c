"""Forward passes alone: evaluation, and the next token of a text."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pipeline.program import Act, Op, Program, Programs


def forward_only(placement: Sequence[int], micro_batches: int) -> Programs:
    """``placement`` is the rank of each stage. A rank takes all micro-batches through one stage, then through its
    next."""
    return tuple(
        Program(
            stages := tuple(stage for stage, home in enumerate(placement) if home == rank),
            micro_batches,
            tuple(Act(Op.FORWARD, stage, b) for stage in stages for b in range(micro_batches)),
        )
        for rank in range(max(placement) + 1)
    )
