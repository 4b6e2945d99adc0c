"""What a pipeline keeps in memory, by the meter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from pipeline_ranks import Log, Pipeline
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.meter import ACTIVATIONS, Meter
from shoal.model.task import PlainTask
from shoal.pipeline.program import Programs
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.train.pool import Pool

WORDS = 4096
Schedule = Callable[[int, int], Programs]


class Keeps(nn.Module):
    """Keeps its output, of as many words as its input, for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight * x)


class Doubles(nn.Module):
    """Keeps nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class ByMaker(Meter):
    """What has been made in forward passes is an activation, even when it has been sent; what has come is none."""

    def _move(self, held: Any, category: str, part: Any) -> None:
        pass


def live(world: World, schedule: Schedule, micro_batches: int) -> tuple[list[float], list[float], float]:
    """Activations alive on this rank, in tensors of WORDS words: after each forward and before each backward pass
    through its stage, of one layer that keeps its output and one that does not; and after the step."""
    task = PlainTask(
        nn.Sequential(*(layer() for _ in range(world.size) for layer in (Keeps, Doubles))),
        lambda output, _: output.sum(),
    )
    forward: list[float] = []
    backward: list[float] = []
    phases = ExitStack()
    units = 2 * world.rank, 2 * world.rank + 1

    def count() -> float:
        return meter.live(ACTIVATIONS) / (4 * WORDS)

    def enter(unit: int, back: bool) -> None:
        if not back:
            phases.enter_context(meter.phase("forward"))
        elif unit == units[1]:
            backward.append(count())

    def leave(unit: int) -> None:
        phases.close()
        if unit == units[1]:
            forward.append(count())

    handlers = replace(Log().handlers, enter_unit=enter, leave_unit=leave)
    passes = schedule(world.size, micro_batches)
    pipeline = Pipeline(world, task, range(0, 2 * world.size, 2), passes, handlers)
    with ByMaker() as meter:
        pipeline.train([{"inputs": torch.randn(WORDS)} for _ in range(micro_batches)])
        return forward, backward, count()


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (4, 2), (2, 5), (3, 3)])
def test_a_rank_keeps_the_activations_of_as_many_micro_batches_as_its_schedule_says(
    pool: Pool, ranks: int, micro_batches: int
) -> None:
    for schedule in (gpipe, one_f_one_b):
        for rank, (forward, _, after) in enumerate(pool.run(live, schedule, micro_batches, ranks=ranks)):
            most = micro_batches if schedule is gpipe else min(ranks - rank, micro_batches)
            # Outputs are alive, too, until the next stage has answered; the last stage's, until its loss is there.
            outputs = most if rank < ranks - 1 else 1
            assert max(forward) == most + outputs, f"{schedule} rank {rank}"
            assert after == 0


def test_an_output_is_not_kept_for_its_backward_pass(pool: Pool) -> None:
    """Once the first gradient has come, all that GPipe has sent has been received."""
    first, last = pool.run(live, gpipe, 3, ranks=2)
    assert first[:2] == ([2, 4, 6], [3, 2, 1])
    assert last[:2] == ([2, 3, 4], [3, 2, 1])
