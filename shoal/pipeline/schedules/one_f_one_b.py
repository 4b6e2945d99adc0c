"""1F1B, one forward pass, one backward pass (PipeDream-Flush: Narayanan et al. 2021, 2006.09503; DAPPLE: Fan et al.
2021)."""

from __future__ import annotations

from shoal.pipeline.program import Act, Op, Program, Programs


def one_f_one_b(ranks: int, micro_batches: int) -> Programs:
    """One stage a rank. Rank r runs ahead by as many forward passes as there are ranks after it, then alternates, so it
    keeps the activations of at most ranks − r micro-batches. Any number of micro-batches will do."""
    return tuple(Program((r,), micro_batches, _order(r, ranks, micro_batches)) for r in range(ranks))


def _order(rank: int, ranks: int, micro_batches: int) -> tuple[Act, ...]:
    forward = [Act(Op.FORWARD, rank, b) for b in range(micro_batches)]
    backward = [Act(Op.BACKWARD, rank, b) for b in range(micro_batches)]
    ahead = min(ranks - 1 - rank, micro_batches)
    pairs = zip(forward[ahead:], backward, strict=False)
    return (*forward[:ahead], *(act for pair in pairs for act in pair), *backward[micro_batches - ahead :])
