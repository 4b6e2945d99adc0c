"""What the words of a layout become: for each, the thing that carries it out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.backends import Reduction
from shoal.context.interpreter import OverPositions
from shoal.context.zigzag import Division
from shoal.data_parallel.allreduce import AllReduce
from shoal.data_parallel.buckets import BUCKET_BYTES
from shoal.data_parallel.server import Server
from shoal.data_parallel.sharing import Sharing
from shoal.data_parallel.stowage import Away, Portion
from shoal.data_parallel.sync import Sync
from shoal.data_parallel.zero import Zero, ZeroThree
from shoal.errors import LayoutError, setting
from shoal.expert.interpreter import WithExperts
from shoal.expert.spread import Spread
from shoal.expert.tokens import Stream
from shoal.layout import Layout, kinds
from shoal.local import Interpreter, LocalParameter
from shoal.memory.activations import Offload, Run, chosen
from shoal.memory.filesystem import warn_of_memory
from shoal.memory.homes import Homes
from shoal.memory.on_disk import OnDisk
from shoal.memory.on_host import OnHost
from shoal.memory.recompute import recompute_attention, recomputed
from shoal.mesh import Coords, Mesh
from shoal.model.context import Batch
from shoal.model.roles import RoleTable, role_of
from shoal.model.task import PlainTask, Task
from shoal.optim.treatment import Treat
from shoal.pipeline.faults import faults
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Op, Program, placement
from shoal.pipeline.program import Programs as EveryRank
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.forward_only import forward_only
from shoal.pipeline.schedules.list_schedule import list_schedule
from shoal.pipeline.simulate import Costs, even
from shoal.pipeline.stages import cut
from shoal.tensor.grid import OnGrid
from shoal.tensor.one_d import OneD
from shoal.tensor.three_d import ThreeD
from shoal.tensor.two_and_half_d import TwoAndHalfD
from shoal.tensor.two_d import TwoD
from shoal.tensor.whole import Whole

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

Shares = tuple[float, ...]


def costs_of(layers: Sequence[tuple[str, nn.Module]], roles: RoleTable) -> list[int]:
    """What stages are balanced by: how many elements a layer computes with. A table is only looked up."""
    return [
        sum(
            parameter.numel() * role.chosen // role.experts if role.experts else parameter.numel()
            for owner, module in layer.named_modules()
            if (role := role_of(roles, f"{name}.{owner}".strip("."))).kind not in ("embed", "position")
            for parameter in module.parameters(recurse=False)
        )
        for name, layer in layers
    ]


def stages_of(layout: Layout, layers: Sequence[tuple[str, nn.Module]], roles: RoleTable) -> tuple[range, ...]:
    """``pp``: the units of each pipeline stage.

    Where no role tells the ends of the model from its blocks, every layer is a block. Raises :class:`LayoutError` where
    there are more stages than layers.
    """
    if layout.stages > len(layers):
        problem = f"{layout.stages} stages are more than the model's {len(layers)} layers"
        example = "give Engine an example=batch, or " if len(layers) == 1 and not roles else ""
        raise LayoutError(setting("layout.pp", layout.pp, problem, f"{example}use pp=1"))
    costs = costs_of(layers, roles)
    if roles:
        stages = cut(costs, layout.stages, layout.stage_layers)
    else:
        between = cut([0, *costs, 0], layout.stages, layout.stage_layers)
        stages = tuple(range(max(0, one.start - 1), min(len(layers), one.stop - 1)) for one in between)
    _check_buffers(layout, layers, stages)
    if kinds.SCHEDULES[layout.schedule].per_micro_batch:
        _check_apart(layout, layers, stages)
    return stages


def shares_of(
    layout: Layout, layers: Sequence[tuple[str, nn.Module]], roles: RoleTable, stages: Sequence[range]
) -> Shares:
    """What each of the ``stages`` costs, where they cost 1 on average; nothing where no order of passes is made for
    that. All ranks find the same: they look at shapes of the whole model, before it is divided."""
    costs = costs_of(layers, roles)
    if layout.list_times is None or not sum(costs):
        return ()
    return tuple(len(stages) * sum(costs[unit] for unit in stage) / sum(costs) for stage in stages)


def check_optimizers(layout: Layout, names: Collection[str]) -> None:
    """Refuse Muon where stages update at times of their own, as its ranks divide the work on matrices between them; and
    where what it updates is on a disk, as it needs all of it at once."""
    for part in layout.offload:
        if "muon" in names and (part.what, part.where) == ("optimizer", "nvme"):
            problem = "Muon needs all of its momenta at once"
            raise LayoutError(setting("layout.offload", part, problem, "use offload=optimizer:cpu"))
    if kinds.SCHEDULES[layout.schedule].per_micro_batch and "muon" in names:
        problem = f"Muon's ranks work together, and under {layout.schedule} they update at times of their own"
        other = "2bw" if kinds.SCHEDULES["2bw"].admits(layout.pp, layout.mb) else "1f1b"
        raise LayoutError(setting("layout.pp", layout.pp, problem, f"use pp={layout.pp}:{other}, or another optimizer"))


def held_units(stages: Sequence[range], homes: Sequence[int]) -> list[list[int]]:
    """``pp``: the units of each pipeline rank, ascending; ``homes`` is the rank of each of the ``stages``."""
    return [
        sorted(unit for stage, home in zip(stages, homes, strict=True) if home == rank for unit in stage)
        for rank in range(max(homes) + 1)
    ]


def _check_apart(layout: Layout, layers: Sequence[tuple[str, nn.Module]], stages: Sequence[range]) -> None:
    """Refuse a parameter of two stages, each of which would update its copy by itself."""
    home: dict[Tensor, int] = {}
    for at, stage in enumerate(stages):
        for parameter in {one for unit in stage for one in layers[unit][1].parameters()}:
            if home.setdefault(parameter, at) != at:
                both = f"stages {home[parameter]} and {at}"
                problem = f"under {layout.schedule} the copies of what {both} share drift apart"
                raise LayoutError(setting("layout.pp", layout.pp, problem, f"use pp={layout.pp}:1f1b"))


def _check_buffers(layout: Layout, layers: Sequence[tuple[str, nn.Module]], stages: Sequence[range]) -> None:
    """Refuse a buffer of two stages: each would write its own."""
    home: dict[Tensor, int] = {}
    for at, stage in enumerate(stages):
        for buffer in {buffer for unit in stage for buffer in layers[unit][1].buffers()}:
            if home.setdefault(buffer, at) != at:
                problem = f"stages {home[buffer]} and {at} would share a module with buffers, each with its own values"
                raise LayoutError(setting("layout.pp", layout.pp, problem, "use pp=1, or a module for each"))


def interpreter_of(layout: Layout, roles: RoleTable) -> Interpreter:
    """``tp``, ``cp``, ``ep`` and ``etp``: who answers for each role."""
    inner = _with_experts(layout, roles, _tensor_interpreter(layout, roles))
    rows = {axis: size for axis, size in layout.tensor_axes if axis in inner.loss_axes}
    if layout.cp == prod(rows.values()) == 1:
        return inner
    if not roles:
        problem = "the module has no role table that tells where attention is"
        raise LayoutError(setting("layout.cp", layout.cp, problem, "use cp=1"))
    return OverPositions(inner, Division(*layout.cp_grid), gather=layout.cp_kind == "gather", rows=rows)


def part_of(interpreter: Interpreter, coords: Coords) -> Callable[[Batch], Batch]:
    """``cp``: what of a micro-batch, whose samples all ranks of a replica have, the one at ``coords`` works on."""
    return partial(interpreter.part, coords=coords) if isinstance(interpreter, OverPositions) else lambda batch: batch


def _with_experts(layout: Layout, roles: RoleTable, tensor: Interpreter) -> Interpreter:
    """Around the ``tensor`` interpreter, where there are experts, one that answers for them."""
    experts = max((role.experts for role in roles.values()), default=0)
    if not experts:
        for key, ranks in (("ep", layout.ep), ("etp", layout.etp)):
            if ranks > 1:
                raise LayoutError(setting(f"layout.{key}", ranks, "the model has no experts", f"use {key}=1"))
        return tensor
    axes = tuple((name, size) for name, size in layout.axes if name != "pp")
    stream = Stream(context=("cp",))
    if isinstance(tensor, OnGrid):
        divided, (repeated,) = tensor.axes, tensor.axes.repeated or (None,)
        multiple = prod(tensor.sizes[name] for name in divided.attended if name not in divided.samples)
        stream = Stream(divided.samples, multiple, divided.positions, divided.hidden, repeated, ("cp",))
    return WithExperts(tensor, Spread(axes, experts, layout.ep, layout.etp), stream)


def _tensor_interpreter(layout: Layout, roles: RoleTable) -> Interpreter:
    if layout.tp == 1:
        return Whole()
    if not roles:
        problem = "the module has no role table"
        raise LayoutError(setting("layout.tp", layout.tp, problem, "give Engine an example=batch, or use tp=1"))
    sizes, loop = dict(layout.tensor_axes), layout.tp_form == "loop"
    match layout.tp_kind:
        case "1d" | "1d-sp":
            return OneD(layout.tp, sequence=layout.tp_kind == "1d-sp")
        case "2d":
            return TwoD(sizes["row"], loop=loop)
        case "2.5d":
            return TwoAndHalfD(sizes["row"], sizes["depth"], loop=loop)
        case _:
            return ThreeD(**sizes)


def run_of(
    layout: Layout, task: Task, interpreter: Interpreter, unit: int, stage: int
) -> Callable[[Tensor, Any], Tensor]:
    """``recompute``: how a layer is run, and what is kept of it for the backward pass. The last layer's backward pass
    follows at once, so recomputing it would free nothing."""
    layers = task.layers()
    name, layer = layers[unit]

    def run(x: Tensor, ctx: Any) -> Tensor:
        interpreter.see(ctx)
        return task.apply_layer(layer, x, ctx)

    if layout.recompute == "none" or (layout.recompute_stages is not None and stage not in layout.recompute_stages):
        return run
    if layout.recompute == "selective":
        if not task.roles:
            problem = "the module has no role table that tells where attention is"
            raise LayoutError(setting("layout.recompute", layout.recompute, problem, "use recompute=full"))
        recompute_attention(name, layer, task.roles)
        return run
    if unit == len(layers) - 1:
        return run
    return recomputed(run, layer, draws=isinstance(task, PlainTask))


def runs_of(
    layout: Layout,
    task: Task,
    interpreter: Interpreter,
    stages: Sequence[range],
    own: Sequence[int],
    device: torch.device,
    swap: Path = Path(),
) -> dict[int, tuple[tuple[int, Run], ...]]:
    """``recompute`` and ``offload=activations``: how each unit of the stages that this rank has as its ``own`` is run.
    All units but the model's last may go; of those, not of bytes, a fraction is one. ``swap`` is for a disk."""
    runs = {stage: [(unit, run_of(layout, task, interpreter, unit, stage)) for unit in stages[stage]] for stage in own}
    part = next((part for part in layout.offload if part.what == "activations"), None)
    if part is not None:
        layers = task.layers()
        elsewhere = OnHost(device) if part.where == "cpu" else OnDisk(device, swap)
        may = sorted(unit for stage in own for unit in stages[stage] if unit < len(layers) - 1)
        goes = chosen(may, part.fraction)
        for stage in own:
            offload, first = Offload(elsewhere, device), stages[stage][0]
            runs[stage] = [
                (unit, offload.around(run, layers[unit][1], first=unit == first, goes=unit in goes, given=unit == 0))
                for unit, run in runs[stage]
            ]
    return {stage: tuple(those) for stage, those in runs.items()}


def sharing_of(layout: Layout) -> Sharing:
    """``zero``, ``sync`` and ``dtype``: what replicas divide, over how many, and the precision of gradients."""
    return Sharing(
        servers=layout.servers or 0,
        # Which passes an order has that is made to measure may depend on the model.
        split_backward=kinds.SCHEDULES[layout.schedule].made_to_measure
        or any(act.op is Op.INPUT_GRADIENT for one in passes_of(layout) for act in one.actions),
        half_grads=layout.half_grads,
        versions=layout.asynchronous,
        int8_gather=layout.int8_gather,
        int8_reduce=layout.int8_reduce,
        size=(layout.zero_group or layout.alike * dict(layout.tensor_axes).get("a", 1)) if layout.zero else 1,
        keep_params=layout.zero < 3 and not _visiting(layout),
        keep_grads=layout.zero < 2,
        cap_bytes=BUCKET_BYTES if layout.zero < 3 and not _visiting(layout) else 0,
    )


def _visiting(layout: Layout) -> bool:
    """Whether parameters come for their use, a unit at a time, as those do that are divided."""
    return any(part.what == "params" for part in layout.offload)


def swap_of(layout: Layout, folder: Path, *, first: bool) -> Path:
    """``folder``, for what is to be on a disk. On the ``first`` rank a warning tells of one that is not on one."""
    if first and any(part.where == "nvme" for part in layout.offload):
        warn_of_memory(folder)
    return folder


def away_of(layout: Layout, homes: Homes | None = None) -> Away | None:
    """``offload``, but for activations: what model states live elsewhere, in ``homes`` where there are ranks."""
    portions = {part.what: Portion(part.where, part.fraction) for part in layout.offload if part.what != "activations"}
    if not portions:
        return None
    return Away(
        homes,
        portions.get("optimizer", Portion()),
        portions.get("params", Portion()),
        grads="grads" in portions,
        early=not layout.asynchronous,
    )


def sync_of(
    layout: Layout,
    held: Sequence[LocalParameter],
    treat: Treat,
    mesh: Mesh,
    uses: Mapping[int, Sequence[str]],
    *,
    masters: bool = True,
    swap: Path = Path(),
) -> Sync:
    """``zero``, ``sync`` and ``offload``: how replicas keep equal, and where. ``uses`` names each unit's parameters;
    ``masters`` says whether those in half precision have float32 copies; ``swap`` is for what lives on a disk."""
    trained = [one for one in held if one.parameter.requires_grad]
    frozen = [one for one in held if not one.parameter.requires_grad]
    away = away_of(layout, Homes(mesh.world.device, swap))
    visit = _visiting(layout)
    sharing = replace(sharing_of(layout), masters=masters, away=away)
    if layout.sync == "server":
        joined: Reduction = "max" if layout.reduce == "max" else "sum"
        return Server(trained, frozen, treat, mesh, sharing, uses=uses, reduction=joined, stale=layout.stale)
    resident = layout.keep_params or layout.stages > 1 or sharing.split_backward
    if layout.zero == 3:
        return ZeroThree(trained, frozen, treat, mesh, sharing, uses=uses, resident=resident)
    sync = (Zero if layout.zero else AllReduce)(trained, frozen, treat, mesh, sharing)
    if visit:
        sync.come_and_go(uses, resident=resident)
    return sync


@cache
def passes_of(layout: Layout, shares: Shares = ()) -> EveryRank:
    """``pp`` and ``mb``: the passes of a training step of all ranks of a pipeline, whose stages have ``shares`` of the
    times that ``list`` is made for (:func:`shares_of`): without them they are alike.

    On which rank a stage is depends on the layout alone. So ``list`` chooses between round the ranks and up and down
    them for stages that are alike, and then the order for those that there are.
    """
    # Of an asynchronous schedule, a step by itself is one of 1F1B.
    name = "1f1b" if kinds.SCHEDULES[layout.schedule].asynchronous else layout.schedule
    if not kinds.SCHEDULES[name].made_to_measure:
        return SCHEDULES[name](layout.pp, layout.mb, layout.chunks)
    home = homes_of(layout) if shares else None
    costs = list_costs(layout, shares)
    return list_schedule(layout.pp, layout.mb, layout.chunks, costs=costs, memory=layout.list_memory, home=home)


def list_costs(layout: Layout, shares: Shares = ()) -> Costs:
    """What ``list`` makes its order for: the times of the layout, and memory in micro-batches, of which each of the V
    stages of a rank holds 1/V."""
    names = ("forward", "input_gradient", "weight_gradient", "transfer")
    times = dict(zip(names, layout.list_times or (1.0, 1.0, 1.0, 0.0), strict=True))
    alike = even(layout.pp, layout.chunks, **times)
    if not shares:
        return alike
    forward, input_gradient, weight_gradient = (
        tuple(time * share for time, share in zip(of_stages, shares, strict=True))
        for of_stages in (alike.forward, alike.input_gradient, alike.weight_gradient)
    )
    return replace(alike, forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient)


def homes_of(layout: Layout) -> tuple[int, ...]:
    """``pp``: the pipeline rank of each stage."""
    return placement(passes_of(layout))


@dataclass(frozen=True)
class Programs:
    """One rank's part of a training step, of an evaluation, and of decoding a token."""

    train: Program
    evaluate: Program
    decode: Program


def programs_of(layout: Layout, rank: int, shares: Shares = ()) -> Programs:
    """``pp`` and ``mb``: what one rank of a pipeline does, in order, with stages of the ``shares``."""

    def mine(passes: EveryRank, train: bool) -> Program:
        programs = lower(passes)
        assert not (found := faults(programs, train=train)), found
        return programs[rank]

    homes = homes_of(layout)
    return Programs(
        train=mine(passes_of(layout, shares), train=True),
        evaluate=mine(forward_only(homes, layout.mb), train=False),
        decode=mine(forward_only(homes, 1), train=False),
    )
