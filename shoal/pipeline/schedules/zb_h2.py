"""ZB-H2 (Qi et al. 2024, 2401.10241): no rank idles from its first pass to its last, for twice the memory of ZB-H1."""

from __future__ import annotations

from shoal.pipeline.program import Program, Programs
from shoal.pipeline.schedules.zb_h1 import put_off


def zb_h2(ranks: int, micro_batches: int) -> Programs:
    """One stage a rank. Rank r runs 2·(ranks − r) − 1 forward passes ahead and puts its weight gradients off by 2·r
    micro-batches, so that every rank keeps at most 2·ranks − 1 of them. Any number of micro-batches will do.

    The ranks do not start and end together. Only if the next step may begin on one while another drains is there no
    bubble; whoever takes a norm over all ranks pays the fill, as with ZB-H1.
    """
    return tuple(
        Program((r,), micro_batches, tuple(put_off(r, micro_batches, ahead=2 * (ranks - r) - 1, late=2 * r)))
        for r in range(ranks)
    )
