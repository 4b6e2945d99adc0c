"""Layouts, ranks and boxes in few words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import TypeVar

from shoal.layout import Layout
from shoal.layout.kinds import SCHEDULES
from shoal.layout.text import value_text
from shoal.placement import Span
from shoal.report.context_words import context_meaning
from shoal.report.offload_words import offload_meaning
from shoal.report.ownership import Section, Share
from shoal.report.pipeline import ALIKE, PassTimes, Pipeline, clock, pipeline
from shoal.report.tensor_words import tensor_meaning

T = TypeVar("T")
_PLACES = 8
"""Of a pipeline with so many ranks at most, each is told."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending numbers: ``0–3``, ``0, 4``, ``0–1, 4–5``, ``0, 4 … 60``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0])]
    words = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(words) if len(words) <= 3 or len(ranks) <= 4 else f"{words[0]}, {words[1]} … {words[-1]}"


def stages_text(stages: Sequence[int]) -> str:
    """``stage 0``, ``stages 0, 3``."""
    return f"stage{'s' * (len(stages) > 1)} {ranks_text(stages)}"


def units_text(names: Sequence[str]) -> str:
    """Names of layers, consecutive numbered ones together: ``embed, blocks 0–3``."""

    def stem(name: str) -> str:
        first, _, last = name.rpartition(".")
        return first if last.isdigit() else ""

    words = []
    for common, run in groupby(names, stem):
        those = list(run)
        if common and len(those) > 1:
            words.append(f"{common} {ranks_text([int(name.rpartition('.')[2]) for name in those])}")
        else:
            words += those
    return ", ".join(words)


def section_text(section: Section, names: Sequence[str]) -> str:
    """The layers of a section, of which ``names`` has the names."""
    return "each of " * (len(section.units) > 1) + units_text([names[unit] for unit in section.units])


def share_text(share: Share, shape: Sequence[int]) -> str:
    """What of a tensor of ``shape`` a share is: ``whole``, ``rows 0–31``, ``rows 0–12 in part``."""
    box = tuple((min(at for at, _ in spans), max(to for _, to in spans)) for spans in zip(*share.boxes, strict=True))
    dims = ("element",) if len(shape) == 1 else ("row", "column")
    cuts = [
        dim + "s" * (span[1] - span[0] > 1) + f" {span_text(span)}"
        for dim, span, n in zip(dims, box, shape, strict=True)
        if span != (0, n)
    ]
    partly = " in part" if len(share.boxes) > 1 else ""
    return (", ".join(cuts) or ("all rows" if partly else "whole")) + partly


def span_text(span: Span) -> str:
    """A half-open span: ``0–1,023``, ``7``."""
    start, stop = span
    return f"{start:,}–{stop - 1:,}" if stop - start > 1 else f"{start:,}"


def few(items: Sequence[T], most: int) -> list[T]:
    """All of them; of more than ``most``, the first ones and the last."""
    return list(items) if len(items) <= most else [*items[: most - 1], items[-1]]


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" + "s" * (number != 1)


def meaning(layout: Layout) -> Iterator[tuple[str, str, str]]:
    """(key, what it does, what it costs) of everything in a layout, outermost mesh axis first."""
    m = layout.mb
    if layout.stages > 1 or layout.asynchronous:
        yield f"pp={value_text(layout, 'pp')}", _cut(layout), _pipeline_cost(layout)
    if layout.dp > 1:
        yield f"dp={layout.dp}", f"{layout.dp} replicas, each with its own samples", _sum_cost(layout)
    if layout.cp > 1:
        what, cost = context_meaning(layout)
        summed = _sum_cost(layout) if layout.dp == 1 else ""
        yield f"cp={value_text(layout, 'cp')}", what, "; ".join(filter(None, (cost, summed)))
    if layout.tp > 1:
        what, cost = tensor_meaning(layout)
        summed = _sum_cost(layout) if layout.dp == layout.cp == 1 else ""  # over depth alone
        yield f"tp={value_text(layout, 'tp')}", what, "; ".join(filter(None, (cost, summed)))
    if layout.zero:
        yield f"zero={value_text(layout, 'zero')}", *_zero(layout)
    if layout.servers:
        yield f"sync={value_text(layout, 'sync')}", *_served(layout, layout.servers)
    if m > 1:
        sent = "each is an update of its own" if _each(layout) > 1 else "their gradients add up and are sent once"
        yield f"mb={m}", f"a step takes {m} micro-batches one after another", sent
    if layout.recompute != "none":
        yield f"recompute={value_text(layout, 'recompute')}", *_recompute(layout)
    yield from offload_meaning(layout)
    if layout.ranks == layout.stages == m == 1 and not layout.offload and not layout.asynchronous:
        yield "dp=1", "one process has everything", "nothing is sent"


def _cut(layout: Layout) -> str:
    v = layout.chunks
    each = "one a rank" if v == 1 else f"{v} a rank: {stages_text(_seen(layout).stages_at(0))} on the first"
    return f"the layers are cut into {counted(layout.stages, 'stage')}, {each}"


def _pipeline_cost(layout: Layout) -> str:
    """What the order of passes comes to, on the clock."""
    seen = _seen(layout)
    kept = f"activations of {_along(seen.peaks)} micro-batch" + "es" * (max(seen.peaks) != 1)
    if not layout.asynchronous:
        made = " (the order is made for that)" if SCHEDULES[layout.schedule].made_to_measure else ""
        idle = f"a rank idles {seen.bubble_share:.0%} of a step"
        alike = "where a forward pass and either half of a backward pass take the same time"
        if layout.list_times is not None:
            alike = "where stages are alike and passes take the times that are given"
        return f"{layout.schedule}: {kept} are kept; {alike}{made}, {idle}"
    versions = f"{_along(seen.weight_versions)} versions of the weights besides the optimizer's"
    old = "one update" if layout.schedule == "2bw" else f"{_along([n - 1 for n in seen.weight_versions])} updates"
    return (
        f"{layout.schedule}: {kept} and {versions} are kept; no rank waits for the end of a step; "
        f"gradients are those of weights {old} old"
    )


def _seen(layout: Layout) -> Pipeline:
    times = ALIKE if layout.list_times is None else PassTimes(*layout.list_times)
    return _pipeline(layout.schedule, layout.pp, layout.mb, layout.chunks, times, layout.list_memory)


_pipeline = cache(pipeline)


def _along(values: Sequence[float]) -> str:
    """Numbers along the pipeline: ``4``, ``4, 3, 2, 1``, ``16, 15 … 1``."""
    words = [clock(value) for value in values]
    if len(set(words)) == 1:
        return words[0]
    return ", ".join(words) if len(words) <= _PLACES else f"{words[0]}, {words[1]} … {words[-1]}"


def _each(layout: Layout) -> int:
    """How many times a step replicas sum their gradients: as often as it updates."""
    return layout.mb if SCHEDULES[layout.schedule].per_micro_batch else 1


def _when(layout: Layout) -> str:
    return "once a step" if _each(layout) == 1 else "after each micro-batch"


def _sum_cost(layout: Layout) -> str:
    n = layout.alike
    if layout.zero or layout.servers or n == 1:
        return ""
    summed = f"gradients are summed{_over(layout)} {_when(layout)}"
    times, formula = _each(layout), "2M(N−1)/N" if _each(layout) > 1 else "2(N−1)/N"
    return f"{summed}; words received for each of its parameters: {formula} = {times * _twice(n):.3g}"


def _over(layout: Layout) -> str:
    """Which ranks hold the same, where that is more than replicas."""
    sizes = {"dp": layout.dp, "cp": layout.cp, "depth": layout.alike // (layout.dp * layout.cp)}
    several = [axis for axis, size in sizes.items() if size > 1]
    return f" over {'·'.join(several)}" if set(several) - {"dp"} else ""


def _twice(n: int) -> float:
    """Words that each of ``n`` ranks receives for each that they sum."""
    return 2 * (n - 1) / n


def _zero(layout: Layout) -> tuple[str, str]:
    n, m, side = layout.alike, layout.mb, dict(layout.tensor_axes).get("a", 1)
    parts = ("optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters")
    of, only_vectors = parts[layout.zero - 1], n == 1 < side
    g = layout.zero_group or n * (side if only_vectors else 1)
    what = f"{of} are divided by {g}{_over(layout)}"
    if only_vectors:
        what = f"of vectors, {of} are divided by {side} over a; every part of a matrix is on one rank"
    elif g < n:
        what += f", in groups of {g} {'ranks' if _over(layout) else 'replicas'}"
    elif side > 1:
        what += f", those of vectors by {n * side}, over a too"
    scattered, scatters, gathered, gathers, about = _when(layout), _each(layout), "after the update", _each(layout), ""
    if layout.zero == 3 and (layout.stages > 1 or layout.keep_params):
        # Its micro-batches overlap: what has been gathered stays until the step's last use of it.
        gathered = "when first used"
    elif layout.zero == 3:
        scattered, scatters, gathered, gathers, about = "after each pass", m, "for each pass", 2 * m, "at most "
    words = (gathers + scatters) * (g - 1) / g + _each(layout) * _twice(n // g or 1) / g
    whose = "each of their elements" if only_vectors else "each of its parameters"
    rounded = [name for name, is_so in (("gradients", layout.int8_reduce), ("parameters", layout.int8_gather)) if is_so]
    as_int8 = f", of {' and '.join(rounded)} rounded to int8" if rounded else ""
    return what, (
        f"gradients are scattered {scattered}, parameters gathered {gathered}; "
        f"words received for {whose}: {about}{words:.3g}{as_int8}"
    )


def _served(layout: Layout, servers: int) -> tuple[str, str]:
    n = layout.alike
    owners = servers * n // layout.dp
    who = "the first replica serves: it keeps" if servers == 1 else f"the first {servers} replicas serve: they divide"
    what = f"{who} the optimizer states"
    made = {
        "mean": "",
        "sum": "; what is applied is the sum of the replicas' mean gradients",
        "max": "; what is applied is, element by element, the largest of the replicas' mean gradients",
    }
    behind = f"; gradients are those of weights {counted(layout.stale, 'step')} old" if layout.stale else ""
    words = f"{(n + owners - 2) / owners:.3g} by a rank that serves" + ", 1 by another" * (owners < n)
    cost = f"words received for each of its parameters: {words}" if n > 1 else "nothing is sent"
    return what + made[
        layout.reduce
    ] + behind, f"gradients are pushed there, and parameters pulled, once a step; {cost}"


def _recompute(layout: Layout) -> tuple[str, str]:
    where = ""
    if layout.recompute_stages is not None:
        where = f" in stage{'s' * (len(layout.recompute_stages) > 1)} {ranks_text(layout.recompute_stages)}"
    if layout.recompute == "full":
        return f"of each layer{where} only the input is kept", "its forward pass runs twice: a third more work"
    return f"attention's inner activations{where} are not kept", "attention's core runs twice"


def keeps(layout: Layout) -> tuple[str, ...]:
    """What lies alike on the ranks, and apart from that what lies otherwise: ZeRO divides some of it, or some serve."""
    if layout.servers:
        return "weights, gradients", "optimizer states"
    return {
        1: ("weights, gradients", "optimizer states"),
        2: ("weights", "gradients, optimizer states"),
    }.get(layout.zero, ("weights, gradients, optimizer states",))
