"""Splits as layouts, and layouts as splits: the planner's numbers, and what Shoal runs."""

from __future__ import annotations

from shoal.layout import Layout, Offload
from shoal.layout.kinds import SCHEDULES
from shoal.plan.work import Split

_DTYPES = {"bf16": "bf16", "fp16": "fp16", "float32": "float32", "float64": "float64"}


def layout_of(split: Split, precision: str, *, half_grads: bool = False) -> Layout:
    """The layout of a split. Raises ``LayoutError`` where no layout says the same."""
    stages = split.pp * split.chunks
    recomputing = None
    if 0 <= split.recomputing < split.pp:
        recomputing = tuple(stage for stage in range(stages) if stage % split.pp < split.recomputing)
    offload = (Offload("optimizer", "cpu", split.offload),) if split.offload else ()
    return Layout(
        dp=split.dp,
        tp=split.tp,
        tp_kind="1d-sp" if split.sequence else "1d",
        pp=split.pp,
        schedule=split.schedule if split.pp > 1 else "1f1b",
        chunks=split.chunks if split.pp > 1 and SCHEDULES[split.schedule].any_chunks else 0,
        stage_layers=split.layers or None,
        cp=split.cp,
        cp_kind=split.cp_kind,
        ep=split.ep,
        etp=split.etp,
        zero=split.zero,
        mb=split.micro_batches,
        recompute=split.recompute,
        recompute_stages=recomputing,
        offload=offload,
        dtype=_DTYPES[precision],
        half_grads=half_grads,
    )


def split_of(layout: Layout, batch: int) -> Split:
    """The split of a layout on its world, for ``batch`` samples a step. Multi-dimensional tensor parallelism counts as
    one dimension of as many ranks; of stages that recompute, the ranks from the first to the last of them do."""
    first = -1
    if layout.recompute_stages is not None:
        first = 1 + max(stage % layout.pp for stage in layout.recompute_stages)
    offload = sum(part.fraction for part in layout.offload if part.what == "optimizer")
    return Split(
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        zero=layout.zero,
        shard=layout.zero_group or 0,
        sequence=layout.tp_kind == "1d-sp" and layout.tp > 1,
        schedule=layout.schedule,
        chunks=layout.chunks,
        samples=batch // (layout.dp * layout.mb),
        micro_batches=layout.mb,
        recompute=layout.recompute,
        recomputing=first,
        offload=offload,
        cp_kind=layout.cp_kind if layout.cp_kind in ("ring", "ulysses", "gather") else "ring",
        layers=layout.stage_layers or (),
    )
