"""1F1B, one forward pass, one backward pass (PipeDream-Flush: Narayanan et al. 2021, 2006.09503; DAPPLE: Fan et al.
2021)."""

from __future__ import annotations

from shoal.pipeline.program import Act, Op, Program, Programs


def one_f_one_b(ranks: int, micro_batches: int, *, overlap: bool = False) -> Programs:
    """One stage a rank. Rank r runs ahead by as many forward passes as there are ranks after it, then alternates, so it
    keeps the activations of at most ranks − r micro-batches. Any number of micro-batches will do.

    That order leaves no slack: every micro-batch waits for tensors to move. With ``overlap`` a rank runs ahead by twice
    as many, and they move while it works; it keeps at most 2·(ranks − r) − 1 micro-batches.
    """
    each = 2 if overlap else 1
    return tuple(
        Program((r,), micro_batches, _order(r, micro_batches, min(each * (ranks - 1 - r), micro_batches)))
        for r in range(ranks)
    )


def _order(stage: int, micro_batches: int, ahead: int) -> tuple[Act, ...]:
    forward = [Act(Op.FORWARD, stage, b) for b in range(micro_batches)]
    backward = [Act(Op.BACKWARD, stage, b) for b in range(micro_batches)]
    pairs = zip(forward[ahead:], backward, strict=False)
    return (*forward[:ahead], *(act for pair in pairs for act in pair), *backward[micro_batches - ahead :])
