"""Interleaved 1F1B (Narayanan et al. 2021, 2104.04473): every rank holds several stages, so that the pipeline fills and
drains in steps of one chunk."""

from __future__ import annotations

from shoal.pipeline.program import Act, Op, Program, Programs


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Programs:
    """``chunks`` stages a rank: rank r holds r, r + ranks, r + 2·ranks, … Micro-batches go in rounds of ``ranks``
    through every chunk, so ``micro_batches`` must be a multiple of ``ranks``."""
    assert micro_batches % ranks == 0
    return tuple(
        Program(tuple(range(r, ranks * chunks, ranks)), micro_batches, _order(r, ranks, micro_batches, chunks))
        for r in range(ranks)
    )


def _order(rank: int, ranks: int, micro_batches: int, chunks: int) -> tuple[Act, ...]:
    rounds = range(0, micro_batches, ranks)
    turns = [(chunk, first + b) for first in rounds for chunk in range(chunks) for b in range(ranks)]
    forward = [Act(Op.FORWARD, chunk * ranks + rank, b) for chunk, b in turns]
    backward = [Act(Op.BACKWARD, (chunks - 1 - chunk) * ranks + rank, b) for chunk, b in turns]
    ahead = 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
    if len(rounds) == 1 or ahead > len(turns):
        ahead = len(turns)  # one round leaves nothing to alternate with
    pairs = zip(forward[ahead:], backward, strict=False)
    return (*forward[:ahead], *(act for pair in pairs for act in pair), *backward[len(turns) - ahead :])
