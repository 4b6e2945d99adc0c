"""Pipelines: the schedules of torch.distributed.pipelining over stages of the same decoder."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bench.trainers import OPTIMIZER, Case, Step, peer_adamw, peer_model
from shoal.comm.world import World
from shoal.config import Model
from shoal.data.batches import Batch
from shoal.layout.kinds import split_evenly
from shoal.model.context import Context, rope_tables
from shoal.model.loss import IGNORED


class Stage(nn.Module):
    """Some of a decoder's layers, which makes the context of a micro-batch for itself."""

    def __init__(self, layers: list[nn.Module], shape: Model) -> None:
        super().__init__()
        self.layers, self.shape = nn.ModuleList(layers), shape

    def forward(self, x: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        rope = rope_tables(positions, self.shape.head_dim, self.shape.rope_theta, torch.float32)
        for layer in self.layers:
            x = layer(x, Context(rope, labels=labels))
        return x


def pipeline(case: Case, world: World, *, schedule: type[ScheduleGPipe] | type[Schedule1F1B]) -> Step:
    """One stage a rank: embedding in the first, head and loss in the last, blocks divided evenly. The two copies of a
    tied table add up their gradients when the schedule has ended."""
    assert world.size == 2, "every rank holds a copy of a tied table"
    first, last = world.rank == 0, world.rank == world.size - 1
    model = peer_model(case)
    ends = [0, *accumulate(split_evenly(case.shape.layers, world.size))]
    layers = list(model.blocks[ends[world.rank] : ends[world.rank + 1]])
    stage = Stage([model.embed] * first + layers + [model.head] * last, case.shape)
    table = (model.embed.table if first else model.head.out).weight if case.shape.tied else None
    del model
    optimizer = peer_adamw(stage)
    parameters = list(stage.parameters())
    counts_in_norm = [p for p in parameters if first or p is not table]
    runner = schedule(
        PipelineStage(stage, world.rank, world.size, world.device),
        case.mb,
        loss_fn=lambda loss, labels, counted: loss / counted,
        scale_grads=False,
    )

    def step(batch: Batch) -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        labels = batch["labels"]
        losses: list[Tensor] = []
        runner.step(
            *([batch["tokens"]] * first),
            positions=batch["positions"],
            labels=labels,
            target=labels,
            losses=losses,
            loss_kwargs={"counted": (labels != IGNORED).sum()},
            return_outputs=False,
        )
        if table is not None:
            dist.all_reduce(table.grad)
        square = get_total_norm([p.grad for p in counts_in_norm if p.grad is not None]) ** 2
        both = torch.stack([square, torch.stack(losses).detach().sum() if last else torch.zeros(())])
        dist.all_reduce(both)
        norm = both[0].sqrt()
        clip_grads_with_norm_(parameters, OPTIMIZER.clip, norm)
        optimizer.step()
        return both[1].item(), norm.item()

    return step


GPIPE = {"ScheduleGPipe": partial(pipeline, schedule=ScheduleGPipe)}
ONE_F_ONE_B = {"Schedule1F1B": partial(pipeline, schedule=Schedule1F1B)}
