"""ZB-V (Qi et al. 2024, 2401.10241): zero bubble in the memory of 1F1B's first rank, over two stages a rank in a V."""

from __future__ import annotations

from shoal.pipeline.program import Programs
from shoal.pipeline.schedules.vee import Vee, in_a_vee


def zb_v(ranks: int, micro_batches: int) -> Programs:
    """Two stages a rank: rank r holds r and 2·ranks − 1 − r, so the first and the last stage are on rank 0. Every rank
    keeps at most 2·ranks chunks, which is the activations of ``ranks`` micro-batches. From its first pass to its last a
    rank does not idle where F, I and W take the same time.

    Any number of micro-batches will do; the order is that of 2·ranks − 1 with fewer.
    """
    return in_a_vee(ranks, micro_batches, 2 * ranks - 1, _write)


def _write(vee: Vee, rank: int, ranks: int, micro_batches: int) -> None:
    after = ranks - rank
    vee.add("F0", 2 * after - 1)
    vee.add("F1 F0", rank)
    vee.add("F1 I1 W1", after)
    while vee.count("F1") < vee.count("F0") or vee.count("F0") < micro_batches:
        if vee.count("F0") < micro_batches:
            vee.add("F0")
        vee.add("I0 W0 F1 I1 W1")
    vee.add("I0 I1", rank)
    vee.add("I0 W0", after)
    vee.add("W1", rank)
    vee.add("W0", rank)
