"""Ranks that hold several stages, and backward passes in two: every schedule, run on a small module."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pipeline_ranks import SCALE, Log, Pipeline, furthest, lines_over, one_process, scale, small_batches
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.model.linear import Linear, attach_sink
from shoal.model.task import PlainTask
from shoal.pipeline.program import Op, Programs
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.forward_only import forward_only
from shoal.train.pool import Pool

EXACT = 1e-12
TWO_A_RANK = ("interleaved", "breadth-first", "zb-v", "dualpipe-v", "list")
CASES = [
    *((name, ranks, 1) for name in ("gpipe", "1f1b", "1f1b-overlap", "zb-h1", "zb-h2", "list") for ranks in (2, 4)),
    *((name, ranks, 2) for name in TWO_A_RANK for ranks in (1, 2, 4)),
    ("interleaved", 2, 4),
    ("breadth-first", 3, 2),
    ("zb-v", 3, 2),
]


class Sink:
    """Adds up the gradient of a weight, and lets it wait while there is a list."""

    def __init__(self, weight: nn.Parameter, kept: list[Any]) -> None:
        self.weight, self.kept = weight, kept
        weight.grad = torch.zeros_like(weight)

    def later(self, contribution: Any) -> bool:
        if self.kept[0] is not None:
            self.kept[0].append(contribution)
        return self.kept[0] is not None

    def add(self, gradient: Tensor) -> None:
        assert self.weight.grad is not None
        self.weight.grad.add_(gradient)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        if not self.later(partial(self._add, left, right)):
            self._add(left, right)

    def _add(self, left: Tensor, right: Tensor) -> None:
        self.add(left.t() @ right)


class Layer(nn.Module):
    """A linear of the kind that can wait, and one that cannot."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.second = Linear(3, wide), nn.Linear(wide, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def task_of(stages: int) -> PlainTask:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [*(Layer(2 + unit % 3) for unit in range(stages)), nn.Linear(3, 2)]
        net = nn.Sequential(*layers).double()
    return PlainTask(net, lambda output, batch: (output - batch["targets"]).square().sum())


def make(world: World, passes: Programs, task: PlainTask) -> tuple[Pipeline, Log]:
    """The pipeline of a rank, whose weights that can wait do; the last stage has two layers."""
    log, kept = Log(), [None]
    stages = len(list(task.module)) - 1

    def postpone(waiting: list[Any] | None) -> None:
        kept[0] = waiting  # type: ignore[call-overload]

    handlers = replace(log.handlers, postpone=postpone)
    pipeline = Pipeline(lines_over(world), task, range(stages), passes, handlers)
    for module in task.module.modules():
        if isinstance(module, Linear):
            attach_sink(module.weight, Sink(module.weight, kept))
    return pipeline, log


def run(world: World, name: str, chunks: int, micro_batches: int) -> tuple[list[tuple[float, float]], list[str], int]:
    """For each of three steps, of which the second has samples of another number: how far the loss of this rank and its
    gradients are from those of one process. And what happened in the last, and its passes that contribute."""
    passes = SCHEDULES[name](world.size, micro_batches, chunks)
    pipeline, log = make(world, passes, task_of(chunks * world.size))
    found = []
    for samples in (4, 3, 4):
        log.events.clear()
        for parameter in pipeline.task.module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        batches = small_batches(micro_batches, samples)
        loss = pipeline.train(batches)
        expected, grads = one_process(task_of(chunks * world.size), batches, lambda batch: batch)
        last = pipeline.stages - 1 in pipeline.held
        mine = {unit: grad for unit, grad in grads.items() if int(unit.split(".")[0]) in pipeline.units}
        found.append((abs(loss - (expected if last else 0)), furthest(pipeline.gradients(), mine)))
    split = sum(act.op is Op.WEIGHT_GRADIENT for act in pipeline.program.actions)
    return found, log.events, split


@pytest.mark.parametrize(("name", "ranks", "chunks"), CASES)
def test_a_step_computes_what_one_process_computes(name: str, ranks: int, chunks: int, pool: Pool) -> None:
    micro_batches = 2 * ranks if name in ("interleaved", "dualpipe-v") else 5
    found = pool.run(run, name, chunks, micro_batches, ranks=ranks)
    for steps, events, _ in found:
        assert [loss < EXACT and grads < EXACT for loss, grads in steps] == [True] * 3, steps
        assert events[-2:] == ["norm", "update"]
        reduced = [event for event in events if event.startswith("reduce")]
        assert len(reduced) == len(set(reduced)) == chunks
        complete = [event for event in events if event.startswith("complete")]
        assert len(complete) >= len(set(complete)) >= chunks
        for event in complete:
            unit = int(event.split()[1])
            stage = min(unit, chunks * ranks - 1)
            assert events.index(f"reduce {stage}") > events.index(event), "no unit is complete after its reduction"
    if name != "list":  # which splits where that fills a gap
        assert any(split for *_, split in found) == name.startswith(("zb", "dualpipe"))


@pytest.mark.parametrize("name", [*TWO_A_RANK])
def test_a_rank_enters_and_leaves_every_unit_of_all_its_stages(name: str, pool: Pool) -> None:
    """Once a micro-batch in either direction."""
    for _, events, _ in pool.run(run, name, 2, 4, ranks=2):
        units = {event.split()[1] for event in events if event.startswith("enter")}
        assert len(units) in (2, 3)
        for unit in units:
            assert events.count(f"enter {unit}") == events.count(f"leave {unit}") == events.count(f"back {unit}") == 4


def forward(world: World, name: str) -> tuple[float, list[list[float]]]:
    """Evaluation, and outputs, where the schedule of training puts stages."""
    passes = SCHEDULES[name](world.size, 4, 2)
    task = task_of(2 * world.size)
    pipeline, _ = make(world, passes, task)
    homes = tuple(next(rank for rank, one in enumerate(passes) if stage in one.stages) for stage in range(4))
    program = Pipeline._lower(forward_only(homes, 3), world.rank, train=False)
    batches = small_batches(3, 2)
    loss = pipeline.executor.run(program, batches, lambda batch: batch)
    outputs = pipeline.executor.outputs(program, batches, lambda batch: batch)
    pipeline.train(small_batches(4, 2))  # and training goes on
    return loss.item(), [output.flatten().tolist() for output in outputs]


@pytest.mark.parametrize("name", TWO_A_RANK)
def test_evaluation_goes_through_stages_where_they_are(name: str, pool: Pool) -> None:
    found = pool.run(forward, name, ranks=2)
    task, batches = task_of(4), small_batches(3, 2)
    outputs = [task.module(batch["inputs"]) for batch in batches]
    expected = sum(task.loss(output, batch).item() for output, batch in zip(outputs, batches, strict=True))
    last = 0 if name in ("zb-v", "dualpipe-v") else 1
    for rank, (loss, made) in enumerate(found):
        if rank == last or (name == "list" and made):
            assert loss == pytest.approx(expected, rel=EXACT)
            assert made == [pytest.approx(output.flatten().tolist(), rel=EXACT) for output in outputs]
        else:
            assert (loss, made) == (0, [])
    assert sum(bool(made) for _, made in found) == 1


def order(world: World, name: str, micro_batches: int) -> list[bool]:
    """Whether this rank's gradients are those of a plain loop over the micro-batches, bit for bit."""
    pipeline, _ = make(world, SCHEDULES[name](world.size, micro_batches, 1), task_of(world.size))
    batches = small_batches(micro_batches, 4)
    pipeline.train(batches)
    plain = task_of(world.size)
    for module in plain.module.modules():
        if isinstance(module, Linear):
            attach_sink(module.weight, Sink(module.weight, [None]))
    factor = scale(0)
    for batch in batches:
        x: Tensor = plain.enter(batch)
        for _, layer in plain.layers():
            x = plain.apply_layer(layer, x, batch)
        plain.loss(x, batch).backward(factor)
    assert factor.item() == SCALE
    expected = {
        f"{unit}.{name}": parameter.grad
        for unit, (_, layer) in enumerate(plain.layers())
        for name, parameter in layer.named_parameters()
    }
    return [torch.equal(grad, expected[name]) for name, grad in pipeline.gradients().items()]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["1f1b", "1f1b-overlap", "zb-h1", "zb-h2", "gpipe"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_where_the_order_of_accumulation_is_kept_gradients_are_equal_bit_for_bit(
    name: str, ranks: int, pool: Pool
) -> None:
    for same in pool.run(order, name, 5, ranks=ranks):
        assert len(same) >= 4
        assert all(same)


def test_a_v_has_both_ends_on_the_first_rank() -> None:
    for name in ("zb-v", "dualpipe-v"):
        assert [program.stages for program in SCHEDULES[name](3, 6, 2)] == [(0, 5), (1, 4), (2, 3)]
