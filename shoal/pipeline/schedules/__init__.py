"""Pipeline schedules: pure functions that write, for all ranks, the passes of a step in order."""

from __future__ import annotations

from collections.abc import Callable

from shoal.pipeline.program import Programs
from shoal.pipeline.schedules.breadth_first import breadth_first
from shoal.pipeline.schedules.dualpipe_v import dualpipe_v
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.interleaved import interleaved
from shoal.pipeline.schedules.list_schedule import list_schedule
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.pipeline.schedules.zb_h1 import zb_h1
from shoal.pipeline.schedules.zb_h2 import zb_h2
from shoal.pipeline.schedules.zb_v import zb_v

SCHEDULES: dict[str, Callable[[int, int, int], Programs]] = {
    "gpipe": lambda ranks, micro_batches, _: gpipe(ranks, micro_batches),
    "1f1b": lambda ranks, micro_batches, _: one_f_one_b(ranks, micro_batches),
    "1f1b-overlap": lambda ranks, micro_batches, _: one_f_one_b(ranks, micro_batches, overlap=True),
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "zb-h1": lambda ranks, micro_batches, _: zb_h1(ranks, micro_batches),
    "zb-h2": lambda ranks, micro_batches, _: zb_h2(ranks, micro_batches),
    "zb-v": lambda ranks, micro_batches, _: zb_v(ranks, micro_batches),
    "dualpipe-v": lambda ranks, micro_batches, _: dualpipe_v(ranks, micro_batches),
    "list": lambda ranks, micro_batches, chunks: list_schedule(ranks, micro_batches, chunks),
}
"""By the name in a layout: from ranks, micro-batches and stages a rank, which only some schedules leave open. Which
numbers each admits is in :data:`shoal.layout.kinds.SCHEDULES`; which rank has which stage, the programs say."""
