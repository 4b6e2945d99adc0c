"""The schedules of torch.distributed.pipelining over stages that sleep: the peers of :mod:`bench.sleep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from bench.nap import NapStage, mean
from shoal.pipeline.program import PASSES, Act, Program, Programs

_OPS = {op.value: op for op in PASSES}


def peer(
    name: str, modules: Mapping[int, NapStage], ranks: int, x: Tensor
) -> tuple[Callable[[], float], Programs | None]:
    """A step on ``x`` [micro-batches, ...], which returns the summed loss, zero where the last stage is elsewhere; and
    the passes of all ranks as the schedule lists them, None where it has no lists but loops of its own.

    ``modules`` are this rank's stages.
    """
    stages = ranks * len(modules)
    made = [PipelineStage(module, number, stages, torch.device("cpu")) for number, module in modules.items()]
    kind = get_schedule_class(name)
    single = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(made[0] if single else made, len(x), loss_fn=mean, scale_grads=False)
    first, last = 0 in modules, stages - 1 in modules
    target = torch.zeros(len(x))

    def step() -> float:
        losses: list[Tensor] = []
        schedule.step(*([x] * first), target=target if last else None, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().item() if losses else 0.0

    return step, None if single else _passes(schedule, ranks, len(x))


def _passes(schedule: PipelineScheduleMulti, ranks: int, micro_batches: int) -> Programs:
    """What a pair that is meant to overlap is made of, it runs one after the other."""
    listed = (schedule.pipeline_order[rank] for rank in range(ranks))
    single = ([one for act in acts if act is not None for one in act.sub_actions or (act,)] for acts in listed)
    orders = (
        tuple(
            Act(op, act.stage_index, act.microbatch_index)
            for act in acts
            if (op := _OPS.get(act.computation_type.value)) is not None
        )
        for acts in single
    )
    return tuple(Program(tuple(sorted({act.stage for act in order})), micro_batches, order) for order in orders)
