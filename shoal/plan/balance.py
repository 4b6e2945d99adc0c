"""Layers moved between stages by what they take, so that the stages with the embedding and the head have fewer."""

from __future__ import annotations

from shoal.pipeline.stages import cut
from shoal.plan.cost import StepTimes
from shoal.plan.work import Split


def balanced(times: StepTimes, split: Split) -> tuple[int, ...] | None:
    """How many layers each global stage should have; None where that is how they are."""
    if split.pp == 1:
        return None
    shape = times.job.shape
    stages = split.pp * split.chunks
    each = [times.layers.layer(layer, split, split.recompute).total.total for layer in shape.each]
    ends = [times.layers.embedding(split).total.total], [times.layers.head(split).total.total]
    found = cut([*ends[0], *each, *ends[1]], stages)
    counts = []
    for number, layers in enumerate(found):
        ends_here = (number == 0) + (number == stages - 1)
        counts.append(len(layers) - ends_here)
    given = split.layers or None
    return None if min(counts) < 1 or tuple(counts) == given else tuple(counts)
