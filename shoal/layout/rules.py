"""What is refused: every rule a layout can break, alone or against a model and a batch.

The list is closed: a size that no rule here mentions is padded or left uneven by whoever divides it. Each
refusal names the setting, its value, and the legal values nearest to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from shoal.errors import LayoutError, nearest, setting
from shoal.layout import kinds
from shoal.layout.kinds import SCHEDULES, Grid, Times, nearest_numbers
from shoal.layout.text import context_text, pipeline_text, tensor_text, value_text, zero_text

if TYPE_CHECKING:
    from shoal.layout.layout import Layout, ModelShape

_ALIKE: Times = (1, 1, 1, 0)
_MOST = 1e12
"""What times and memory of a list order are below."""


def refusal(layout: Layout, key: str, problem: str, legal: str) -> LayoutError:
    """The error that names ``layout.KEY``, its value as written, what is wrong and what would be right."""
    return LayoutError(setting(f"layout.{key}", value_text(layout, key), problem, legal))


# ---- alone: each field -------------------------------------------------------------------------------------


def check_fields(layout: Layout) -> None:
    """Words that are known and numbers in range, each field for itself."""
    for key, word, known in (
        ("tp", layout.tp_kind, kinds.TENSOR_KINDS),
        ("tp", layout.tp_form, kinds.TENSOR_FORMS),
        ("pp", layout.schedule, tuple(SCHEDULES)),
        ("cp", layout.cp_kind, kinds.CONTEXT_KINDS),
        ("sync", layout.sync, kinds.SYNCS),
        ("sync", layout.reduce, kinds.REDUCES),
        ("recompute", layout.recompute, kinds.RECOMPUTES),
        ("dtype", layout.dtype, kinds.DTYPES),
        *(("offload", part.what, kinds.OFFLOAD_WHATS) for part in layout.offload),
        *(("offload", part.where, kinds.OFFLOAD_WHERES) for part in layout.offload),
    ):
        if word not in known:
            raise refusal(layout, key, f"unknown '{word}'{nearest(word, known)}", f"use one of {', '.join(known)}")
    for key in ("dp", "tp", "pp", "cp", "ep", "etp", "mb"):
        size = getattr(layout, key)
        if size < 1 and (key, size) != ("dp", -1):
            rest = ", or dp=-1 for the ranks that are left" if key == "dp" else ""
            raise refusal(layout, key, "sizes start at 1", _use(key, [_smallest(layout, key)]) + rest)
    if layout.zero not in kinds.ZERO_STAGES:
        raise refusal(layout, "zero", "ZeRO has stages 0 to 3", "use zero=3")
    if layout.zero_group is not None and (layout.zero == 0 or layout.zero_group < 1):
        problem = "stage 0 shards nothing, so it has no groups" if layout.zero == 0 else "sizes start at 1"
        raise refusal(layout, "zero", problem, f"use zero={layout.zero}")
    if layout.zero == 0 and (layout.int8_gather or layout.int8_reduce):
        raise refusal(layout, "zero", "stage 0 divides nothing, and its sums are exact", "use zero=0")
    if layout.keep_params and layout.zero != 3:
        legal = zero_text(layout.zero, layout.zero_group, layout.int8_gather, layout.int8_reduce)
        raise refusal(layout, "zero", "only stage 3 gives parameters back between passes", f"use zero={legal}")
    if layout.sync == "allreduce" and (layout.servers is not None or layout.stale or layout.reduce != "mean"):
        problem = "all-reduce has no servers, no staleness and no other reduction than the mean"
        raise refusal(layout, "sync", problem, "use sync=allreduce")
    if (layout.servers is not None and layout.servers < 1) or layout.stale < 0:
        raise refusal(layout, "sync", "servers start at 1 and staleness at 0", "use sync=server")
    if layout.half_grads and layout.dtype not in kinds.HALVES:
        raise refusal(layout, "dtype", "gradients in half precision need bf16 or fp16", "use dtype=bf16{grads=bf16}")
    _check_offload(layout)


def _smallest(layout: Layout, key: str) -> str:
    """The least value of ``key`` that is of the same kind, under the same options."""
    if key == "tp":
        grid = kinds.nearest_tensor_grids(1, layout.tp_kind, layout.tp_grid)[0]
        return tensor_text(prod(grid), layout.tp_kind, grid, layout.tp_form)
    if key == "pp":
        return pipeline_text(1, layout.schedule, layout.chunks, None, layout.list_times, layout.list_memory)
    if key == "cp":
        ranks = kinds.nearest_context_grid(1, layout.cp_kind, layout.cp_grid)
        return context_text(prod(ranks), layout.cp_kind, ranks)
    return "1"


def _check_offload(layout: Layout) -> None:
    seen: set[str] = set()
    for part in layout.offload:
        if not 0 < part.fraction <= 1:
            legal = f"use offload={part.what}:{part.where}@0.5"
            raise refusal(layout, "offload", f"'{part}' needs a fraction above 0 and at most 1", legal)
        if (part.what, part.where) == ("grads", "nvme"):
            problem = "gradients add up in memory, and come too often for a disk"
            raise refusal(layout, "offload", problem, f"use offload={replace(part, where='cpu')}")
        if part.what in seen:
            raise refusal(layout, "offload", f"{part.what} is given twice", f"keep one offload={part}")
        seen.add(part.what)


# ---- alone: shapes -----------------------------------------------------------------------------------------


def check_shapes(layout: Layout) -> None:
    """Grids of the right shape, and V only where a schedule has a choice."""
    size, kind = layout.tp, layout.tp_kind
    tensor = kinds.tensor_grid(size, kind, layout.tp_grid)
    if tensor is None:
        grids = kinds.nearest_tensor_grids(size, kind, layout.tp_grid)
        needs = kinds.tensor_needs(size, kind, layout.tp_grid)
        raise refusal(layout, "tp", needs, _use("tp", (_tensor(kind, grid) for grid in grids)))
    if layout.tp_form == "loop" and kind not in kinds.SUMMA_KINDS:
        raise refusal(layout, "tp", "only 2-D and 2.5-D have a loop form", _use("tp", [_tensor(kind, tensor)]))
    if kinds.context_grid(layout.cp, layout.cp_kind, layout.cp_grid) is None:
        grid = kinds.nearest_context_grid(layout.cp, layout.cp_kind, layout.cp_grid)
        legal = _use("cp", [context_text(prod(grid), layout.cp_kind, grid)])
        raise refusal(layout, "cp", f"{layout.cp_kind} needs two sides whose product is N", legal)
    own = SCHEDULES[layout.schedule]
    if layout.chunks < 0 or (layout.chunks not in (0, own.chunks) and not own.any_chunks):
        legal = _use("pp", [pipeline_text(layout.pp, layout.schedule, own.chunks)])
        raise refusal(layout, "pp", f"{layout.schedule} has exactly {own.chunks} stage(s) a rank", legal)
    _check_measures(layout)


def _check_measures(layout: Layout) -> None:
    """Times and memory where an order is made for them, and such as one can be made for."""
    times, memory = layout.list_times, layout.list_memory
    timely = times is None or (len(times) == 4 and all(0 <= time < _MOST for time in times) and sum(times[:3]) > 0)
    roomy = memory is None or 1 <= memory < _MOST

    def legal(schedule: str, times: Times | None, memory: float | None) -> str:
        chunks = layout.chunks or SCHEDULES[layout.schedule].chunks
        return pipeline_text(layout.pp, schedule, chunks, layout.stage_layers, times, memory)

    if not SCHEDULES[layout.schedule].made_to_measure:
        given = " and ".join(name for name, one in (("times", times), ("memory", memory)) if one is not None)
        if given:
            listed = legal("list", times if timely else _ALIKE, memory if roomy else 1)
            those = [legal(layout.schedule, None, None), listed]
            raise refusal(layout, "pp", f"only list is made for {given}", _use("pp", those))
        return
    if not timely:
        problem = "times needs four numbers F/I/W/C from 0 to below 1e12, not all of the first three 0"
        raise refusal(layout, "pp", problem, _use("pp", [legal(layout.schedule, _ALIKE, memory if roomy else 1)]))
    if not roomy:
        problem = "memory starts at 1, what a rank holds of one micro-batch, and is below 1e12"
        raise refusal(layout, "pp", problem, _use("pp", [legal(layout.schedule, times, 1)]))


# ---- alone: fields together --------------------------------------------------------------------------------


def check_together(layout: Layout) -> None:
    """Fields that exclude one another, on a layout whose grids and stages are derived."""
    _check_pipeline(layout)
    if layout.sync == "server":
        _check_servers(layout)
    if SCHEDULES[layout.schedule].asynchronous and layout.zero > 1:
        problem = f"{layout.schedule} keeps several weight versions, which zero > 1 cannot shard"
        raise refusal(layout, "zero", problem, "use zero=1")
    for part in layout.offload:
        if SCHEDULES[layout.schedule].asynchronous and part.what in ("params", "grads"):
            problem = f"{layout.schedule} has several versions of {part.what} on the device at once"
            raise refusal(layout, "offload", problem, f"use offload=optimizer:{part.where}")
        if layout.sync == "server" and part.what != "activations":
            problem = "servers keep what they take in and hand out on the device"
            raise refusal(layout, "offload", problem, f"use offload=activations:{part.where}, or sync=allreduce")
    if layout.dp != -1:
        _check_groups(layout)


def _check_pipeline(layout: Layout) -> None:
    schedule = SCHEDULES[layout.schedule]
    if not schedule.admits(layout.pp, layout.mb):
        step, least = schedule.mb_step(layout.pp), schedule.mb_least(layout.pp)
        admitted = f"multiples of {step}" if step > 1 else f"at least {least}"
        problem = f"{layout.schedule} over {layout.pp} ranks admits {admitted} micro-batches"
        raise refusal(layout, "mb", problem, _use("mb", schedule.nearest_mb(layout.pp, layout.mb)))
    layers, stages = layout.stage_layers, layout.stages
    if layers is not None and (len(layers) != stages or min(layers) < 1):
        even = kinds.split_evenly(max(sum(layers), stages), stages)
        legal = _use("pp", [_pipeline(layout, even)])
        raise refusal(layout, "pp", f"layers needs {stages} numbers from 1, one a stage", legal)
    chosen = layout.recompute_stages
    if chosen is None:
        return
    if layout.recompute == "none":
        raise refusal(layout, "recompute", "none has no stages to name", "use recompute=none")
    legal_stages = sorted({stage for stage in chosen if 0 <= stage < stages} or {0})
    if list(chosen) != legal_stages:
        legal = f"use recompute={layout.recompute}{{stages={'/'.join(map(str, legal_stages))}}}"
        raise refusal(layout, "recompute", f"stages are 0 to {stages - 1}, ascending, each once", legal)


def _check_servers(layout: Layout) -> None:
    if layout.zero:
        raise refusal(layout, "zero", "sync=server keeps the optimizer states on the servers", "use zero=0")
    if SCHEDULES[layout.schedule].asynchronous:
        problem = f"servers take in whole steps one after another, and under {layout.schedule} steps overlap"
        raise refusal(layout, "sync", problem, f"use sync=allreduce or pp={layout.pp}:1f1b")
    assert layout.servers is not None
    if layout.dp != -1 and layout.servers > layout.dp:
        problem = f"servers are replicas, of which there are {layout.dp}"
        raise refusal(layout, "sync", problem, _use("sync", [f"server/{layout.dp}"]))
    if layout.reduce == "max" and layout.cp * layout.tp * layout.pp > 1:
        problem = "the largest is of whole gradients, and with cp, tp or pp ranks may have a part of one each"
        raise refusal(layout, "sync", problem, "use sync=server{reduce=sum}")
    if layout.reduce != "mean" and layout.cp > 1:
        problem = "a replica's own mean is over its ranks of cp, which do not tell each other"
        raise refusal(layout, "sync", problem, "use sync=server")


def _check_groups(layout: Layout) -> None:
    replicas, experts = layout.alike, layout.dp * layout.cp * layout.tp
    if layout.zero_group is not None and replicas % layout.zero_group:
        sizes = nearest_numbers(layout.zero_group, lambda n: replicas % n == 0, most=replicas)
        options = layout.int8_gather, layout.int8_reduce, layout.keep_params
        legal = _use("zero", [zero_text(layout.zero, size, *options) for size in sizes])
        product = "dp·cp·depth" if layout.tp_kind == "2.5d" else "dp·cp"
        raise refusal(layout, "zero", f"the group does not divide {product} = {replicas}", legal)
    if experts % layout.etp:
        sizes = nearest_numbers(layout.etp, lambda n: experts % (n * layout.ep) == 0, most=experts) or [1]
        raise refusal(layout, "etp", f"does not divide dp·cp·tp = {experts}", _use("etp", sizes))
    if experts % (layout.ep * layout.etp):
        sizes = nearest_numbers(layout.ep, lambda n: experts % (n * layout.etp) == 0, most=experts)
        problem = f"ep·etp = {layout.ep * layout.etp} does not divide dp·cp·tp = {experts}"
        raise refusal(layout, "ep", problem, _use("ep", sizes))


# ---- against a model and a batch ---------------------------------------------------------------------------


def check_fit(layout: Layout, model: ModelShape, batch: int) -> None:
    """Whether a layout on its world fits a model and a global batch of ``batch`` samples a step."""
    _check_layers(layout, model)
    _check_tensor(layout, model)
    _check_ulysses(layout, model)
    _check_experts(layout, model)
    _check_batch(layout, batch)


def _check_layers(layout: Layout, model: ModelShape) -> None:
    name, chunks, stages = layout.schedule, layout.chunks, layout.stages
    if stages > model.layers:
        fits = range(model.layers // chunks, 1, -1)
        ranks = next((n for n in fits if SCHEDULES[name].admits(n, layout.mb)), None)
        legal = [pipeline_text(ranks, name, chunks)] if ranks else []
        if SCHEDULES[name].any_chunks and (most := model.layers // layout.pp):
            legal.append(pipeline_text(layout.pp, name, most))
        problem = f"{stages} stages are more than the model's {model.layers} layers"
        raise refusal(layout, "pp", problem, _use("pp", legal or ["1"]))
    if layout.stage_layers is not None and sum(layout.stage_layers) != model.layers:
        even = kinds.split_evenly(model.layers, stages)
        problem = f"layers sum to {sum(layout.stage_layers)}, but the model has {model.layers}"
        raise refusal(layout, "pp", problem, _use("pp", [_pipeline(layout, even)]))
    if SCHEDULES[name].per_micro_batch and model.tied:
        problem = f"under {name} the two copies of a tied embedding drift apart"
        raise refusal(layout, "pp", problem, f"use model.tied=false or pp={layout.pp}:1f1b")


def _check_tensor(layout: Layout, model: ModelShape) -> None:
    kind, grid = layout.tp_kind, layout.tp_grid
    heads_side, hidden_side = kinds.head_side(kind), kinds.hidden_side(kind)

    def fits(grid: Grid) -> bool:
        whole_columns = hidden_side is None or model.hidden % grid[hidden_side] == 0
        return whole_columns and _heads_fit(model, grid[heads_side]) and grid[heads_side] <= model.vocab

    def legal(side: int) -> str:
        """The nearest grids that fit when one side changes; without tensor parallelism every model fits."""
        lengths = nearest_numbers(
            grid[side], lambda n: fits(kinds.resize_tensor_grid(kind, grid, side, n)), most=model.hidden
        )
        return _use("tp", [_tensor(kind, kinds.resize_tensor_grid(kind, grid, side, n)) for n in lengths] or ["1"])

    if not _heads_fit(model, grid[heads_side]):
        over = kinds.side_text(kind, heads_side, grid[heads_side])
        raise refusal(layout, "tp", f"{_heads(model)} do not divide over {over}", legal(heads_side))
    if model.vocab < grid[heads_side]:
        problem = f"a vocabulary of {model.vocab} leaves some of {grid[heads_side]} ranks without a row"
        raise refusal(layout, "tp", problem, legal(heads_side))
    if hidden_side is not None and not fits(grid):
        over = kinds.side_text(kind, hidden_side, grid[hidden_side])
        problem = f"hidden size {model.hidden} does not divide over {over}"
        raise refusal(layout, "tp", problem, legal(hidden_side))


def _check_ulysses(layout: Layout, model: ModelShape) -> None:
    columns = layout.tp_grid[kinds.head_side(layout.tp_kind)]
    share, ring = layout.cp_grid
    if not _heads_fit(model, columns * share):
        sizes = nearest_numbers(share, lambda n: _heads_fit(model, columns * n), most=model.heads)
        legal = _use("cp", [context_text(n * ring, layout.cp_kind, (n, ring)) for n in sizes])
        problem = f"{_heads(model)} do not divide over {columns} tensor-parallel × {share} Ulysses ranks"
        raise refusal(layout, "cp", problem, legal)


def _check_experts(layout: Layout, model: ModelShape) -> None:
    for key in ("ep", "etp"):
        if getattr(layout, key) > 1 and model.experts == 0:
            raise refusal(layout, key, "the model has no experts", f"use {key}=1")
    inside = layout.cp * layout.tp
    if layout.sync == "server" and inside % (layout.ep * layout.etp):
        sizes = nearest_numbers(layout.ep, lambda n: inside % (n * layout.etp) == 0, most=inside)
        key, legal = ("ep", _use("ep", sizes)) if sizes else ("etp", "use etp=1")
        problem = f"servers have all experts, and ep·etp = {layout.ep * layout.etp} ranks are not within a replica"
        raise refusal(layout, key, problem, legal)
    if model.experts % layout.ep:
        ranks = layout.dp * layout.cp * layout.tp
        sizes = nearest_numbers(
            layout.ep, lambda n: model.experts % n == 0 and ranks % (n * layout.etp) == 0, most=model.experts
        )
        raise refusal(layout, "ep", f"{model.experts} experts do not divide over {layout.ep} ranks", _use("ep", sizes))


def _check_batch(layout: Layout, batch: int) -> None:
    dp, mb = layout.dp, layout.mb
    if batch % (dp * mb) == 0:
        return
    schedule = SCHEDULES[layout.schedule]
    key = "dp" if batch % dp else "mb"
    sizes = (
        nearest_numbers(dp, lambda n: batch % (n * mb) == 0, most=batch)
        if key == "dp"
        else nearest_numbers(mb, lambda n: batch % (dp * n) == 0 and schedule.admits(layout.pp, n), most=batch)
    )
    samples = -(-batch // (dp * mb)) * dp * mb
    legal = " or ".join([f"{key}={size}" for size in sizes] + [f"a global batch of {samples}"])
    problem = f"a global batch of {batch} samples does not divide by dp·mb = {dp}·{mb}"
    raise refusal(layout, key, problem, f"use {legal}")


def _heads_fit(model: ModelShape, ranks: int) -> bool:
    """Whole heads on every rank, with key/value heads either divided over the ranks or replicated evenly."""
    return model.heads % ranks == 0 and (model.kv_heads % ranks == 0 or ranks % model.kv_heads == 0)


def _heads(model: ModelShape) -> str:
    shared = f" with {model.kv_heads} key/value heads" if model.kv_heads != model.heads else ""
    return f"{model.heads} attention heads{shared}"


def _pipeline(layout: Layout, layers: Grid) -> str:
    """The pipeline of a layout, with other layers."""
    return pipeline_text(layout.pp, layout.schedule, layout.chunks, layers, layout.list_times, layout.list_memory)


def _tensor(kind: str, grid: Grid) -> str:
    return tensor_text(prod(grid), kind, grid)


def _use(key: str, values: Iterable[object]) -> str:
    return "use " + " or ".join(f"{key}={value}" for value in values)
