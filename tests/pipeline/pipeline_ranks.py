"""What the tests of pipelines run on each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.model.context import Batch
from shoal.model.task import PlainTask, Task
from shoal.pipeline.executor import Executor, Handlers, Stage
from shoal.pipeline.faults import faults
from shoal.pipeline.lines import Lines
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Act, Op, Program, Programs, placement

SCALE = 0.37


class Log:
    """Handlers that write down what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        say = self.events.append
        self.handlers = Handlers(
            unit_done=lambda unit, final: say(f"{'complete' if final else 'done'} {unit}"),
            reduce=lambda stage, _: say(f"reduce {stage}"),
            norm=lambda _: say("norm"),
            update=lambda _: say("update"),
            enter_unit=lambda unit, backward: say(f"{'back' if backward else 'enter'} {unit}"),
            leave_unit=lambda unit: say(f"leave {unit}"),
        )


def lines_over(world: World) -> Lines:
    """Those of a pipeline of all ranks."""
    ranks = world.everyone.ranks
    return Lines.over(lambda channel: world.group(ranks, "world", channel))


class Pipeline:
    """This rank's part of a task cut before the layers ``starts``, one a stage."""

    def __init__(
        self,
        world: World | Lines,
        task: Task,
        starts: Sequence[int],
        passes: Programs,
        handlers: Handlers | None = None,
    ) -> None:
        self.task, self.stages = task, len(starts)
        lines = world if isinstance(world, Lines) else lines_over(world)
        rank = lines.ranks.rank
        layers = [layer for _, layer in task.layers()]
        ends = [*starts[1:], len(layers)]
        self.held = [stage for stage, home in enumerate(placement(passes)) if home == rank]
        self.units = [unit for stage in self.held for unit in range(starts[stage], ends[stage])]
        stages = [
            Stage(
                stage,
                stage == 0,
                stage == self.stages - 1,
                tuple((unit, partial(task.apply_layer, layers[unit])) for unit in range(starts[stage], ends[stage])),
            )
            for stage in self.held
        ]
        self.executor = Executor(task, stages, handlers or Log().handlers, lines)
        self.program = self._lower(passes, rank)

    @staticmethod
    def _lower(passes: Programs, rank: int, train: bool = True) -> Program:
        programs = lower(passes)
        assert faults(programs, train=train) == []
        return programs[rank]

    def train(self, batches: Sequence[Batch], contexts: Callable[[Batch], object] = lambda batch: batch) -> float:
        return self.executor.run(self.program, batches, contexts, scale).item()

    def gradients(self) -> dict[str, Tensor]:
        """Those of the parameters that this rank's layers use, by name."""
        return {
            f"{unit}.{name}": parameter.grad
            for unit, (_, layer) in enumerate(self.task.layers())
            if unit in self.units
            for name, parameter in layer.named_parameters()
            if parameter.grad is not None
        }


def scale(micro_batch: int) -> Tensor:
    return torch.tensor(SCALE, dtype=torch.float64)


def one_process(
    task: Task, batches: Sequence[Batch], contexts: Callable[[Batch], object]
) -> tuple[float, dict[str, Tensor]]:
    """The summed loss and the gradients of all layers' parameters, with the plain loop."""
    losses = []
    for batch in batches:
        x, ctx = task.enter(batch), contexts(batch)
        for _, layer in task.layers():
            x = task.apply_layer(layer, x, ctx)
        losses.append(task.loss(x, ctx))
    total = torch.stack(losses).sum()
    (total * SCALE).backward()
    grads = {
        f"{unit}.{name}": parameter.grad
        for unit, (_, layer) in enumerate(task.layers())
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }
    return total.item(), grads


def furthest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of two sets of gradients, each relative to the norm of the expected; infinite where one
    lacks what the other has."""
    if found.keys() != expected.keys() or not found:
        return float("inf")
    return max(((found[name] - one).norm() / one.norm()).item() for name, one in expected.items())


def small_net(seed: int = 0) -> nn.Sequential:
    """Seven layers whose widths and weights differ; one of them works in place."""
    torch.manual_seed(seed)
    layers = [
        nn.Linear(3, 5),
        nn.Tanh(),
        nn.Linear(5, 4),
        nn.ReLU(inplace=True),
        nn.Linear(4, 6),
        nn.Tanh(),
        nn.Linear(6, 2),
    ]
    return nn.Sequential(*layers).double()


def small_task(module: nn.Sequential) -> PlainTask:
    return PlainTask(module, lambda output, batch: (output - batch["targets"]).square().sum())


def small_batches(micro_batches: int, samples: int) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(samples)
    draw = partial(torch.randn, dtype=torch.float64, generator=made)
    return [{"inputs": draw(samples, 3), "targets": draw(samples, 2)} for _ in range(micro_batches)]


def breadth_first(home: Sequence[int], micro_batches: int) -> Programs:
    """Stages in turn, all micro-batches through one before the next: valid for any placement."""
    return tuple(
        Program(
            stages := tuple(stage for stage, rank in enumerate(home) if rank == one),
            micro_batches,
            (
                *(Act(Op.FORWARD, stage, b) for stage in stages for b in range(micro_batches)),
                *(Act(Op.BACKWARD, stage, b) for stage in reversed(stages) for b in range(micro_batches)),
            ),
        )
        for one in range(max(home) + 1)
    )
