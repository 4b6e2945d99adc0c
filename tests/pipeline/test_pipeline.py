"""Several ranks against one process: losses, gradients, words, messages, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from pipeline_ranks import (
    Log,
    Pipeline,
    breadth_first,
    furthest,
    one_process,
    small_batches,
    small_net,
    small_task,
)
from torch import nn

from shoal.comm.world import World
from shoal.config import Model
from shoal.model.decoder import Decoder
from shoal.pipeline.program import Programs, placement
from shoal.pipeline.schedules.forward_only import forward_only
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.train.pool import Pool

Schedule = Callable[[int, int], Programs]
SCHEDULES = [gpipe, one_f_one_b]
STARTS = {1: (0,), 2: (0, 3), 3: (0, 2, 3), 4: (0, 1, 3, 5)}
EXACT = 1e-12


def whole(batch: object) -> object:
    return batch


def steps(world: World, schedule: Schedule, micro_batches: int, samples: Sequence[int]) -> list[tuple[float, float]]:
    """For one step of each number of samples: the loss, less that of one process on the last rank, and how far this
    rank's gradients are from those of one process."""
    found = []
    pipeline = Pipeline(world, small_task(small_net()), STARTS[world.size], schedule(world.size, micro_batches))
    for size in samples:
        batches = small_batches(micro_batches, size)
        pipeline.task.module.zero_grad()
        loss = pipeline.train(batches)
        expected, grads = one_process(small_task(small_net()), batches, whole)
        mine = {name: grad for name, grad in grads.items() if int(name[0]) in pipeline.units}
        last = world.rank == world.size - 1
        found.append((loss / expected - 1 if last else loss, furthest(pipeline.gradients(), mine)))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 1), (2, 5), (3, 2), (4, 1), (4, 3), (4, 8)])
def test_a_step_computes_what_one_process_computes(
    pool: Pool, schedule: Schedule, ranks: int, micro_batches: int
) -> None:
    """Also when the next step's samples have another size, and again when they have the first."""
    for of_rank in pool.run(steps, schedule, micro_batches, (4, 7, 4), ranks=ranks):
        assert [abs(loss) < EXACT and grads < EXACT for loss, grads in of_rank] == [True] * 3, of_rank


SHAPE = Model(layers=3, hidden=12, heads=3, kv_heads=1, ffn=20, vocab=31, dropout=0.2)


def decoder_batches(micro_batches: int, length: int) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(length)
    batches = []
    for number in range(micro_batches):
        tokens = torch.randint(SHAPE.vocab, (2, length + 1), generator=made)
        labels = tokens[:, 1:].clone()
        labels[0, : length // 2 + number] = -100
        batches.append(
            {
                "tokens": tokens[:, :-1],
                "labels": labels,
                "positions": torch.arange(length).expand(2, -1),
                "sample": torch.tensor([2 * number, 2 * number + 1]),
            }
        )
    return batches


def decoder_steps(world: World, schedule: Schedule, starts: Sequence[int], lengths: Sequence[int]) -> list[float]:
    torch.manual_seed(1)
    decoder, same = Decoder(SHAPE).double(), Decoder(SHAPE).double()
    same.load_state_dict(decoder.state_dict())
    pipeline = Pipeline(world, decoder, starts, schedule(world.size, 4))
    found = []
    for step, length in enumerate(lengths):
        batches = decoder_batches(4, length)
        contexts = partial(decoder.context, seed=5, step=step, train=True)
        decoder.zero_grad()
        same.zero_grad()
        loss = pipeline.train(batches, contexts)
        expected, grads = one_process(same, batches, contexts)
        mine = {name: grad for name, grad in grads.items() if int(name[0]) in pipeline.units}
        found.append(furthest(pipeline.gradients(), mine))
        if pipeline.held[-1] == pipeline.stages - 1:
            found.append(abs(loss / expected - 1))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("starts", [(0, 2), (0, 3, 4), (0, 1, 2, 4)])
def test_a_decoder_with_dropout_and_masked_labels_may_change_its_sequence_length(
    pool: Pool, schedule: Schedule, starts: tuple[int, ...]
) -> None:
    found = pool.run(decoder_steps, schedule, starts, (5, 9, 5), ranks=len(starts))
    assert max(max(of_rank) for of_rank in found) < EXACT, found


def several_stages(world: World, home: Sequence[int]) -> list[float]:
    pipeline = Pipeline(world, small_task(small_net()), (0, 1, 3, 5), breadth_first(home, 3))
    batches = small_batches(3, 4)
    loss = pipeline.train(batches)
    expected, grads = one_process(small_task(small_net()), batches, whole)
    mine = {name: grad for name, grad in grads.items() if int(name[0]) in pipeline.units}
    return [furthest(pipeline.gradients(), mine), abs(loss - (expected if 3 in pipeline.held else 0))]


@pytest.mark.parametrize("home", [(0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 2, 0)])
def test_a_rank_may_hold_several_stages_wherever_they_lie(pool: Pool, home: tuple[int, ...]) -> None:
    """In a loop, in a V, whose tip hands over within one rank, and in any other way."""
    found = pool.run(several_stages, home, ranks=max(home) + 1)
    assert max(max(of_rank) for of_rank in found) < EXACT, found


def with_frozen(world: World, frozen: Sequence[int]) -> tuple[float, list[str], float]:
    task, same = small_task(small_net()), small_task(small_net())
    for module in (task.module, same.module):
        assert isinstance(module, nn.Sequential)
        for unit in frozen:
            module[unit].requires_grad_(False)
    log = Log()
    pipeline = Pipeline(world, task, (0, 2, 3), one_f_one_b(3, 2), log.handlers)
    batches = small_batches(2, 4)
    world.ledger.clear()
    pipeline.train(batches)
    _, grads = one_process(same, batches, whole)
    mine = {name: grad for name, grad in grads.items() if int(name[0]) in pipeline.units}
    events = [event for event in log.events if event.startswith(("back", "done", "complete"))]
    return (furthest(pipeline.gradients(), mine) if mine else 0.0), events, world.ledger.words(purpose="boundary")


@pytest.mark.parametrize(
    ("frozen", "back"),
    [
        ((0,), (False, True, True)),
        ((0, 2), (False, False, True)),
        ((2,), (True, True, True)),
        ((6,), (True, True, True)),
    ],
)
def test_frozen_stages_are_done_and_no_gradient_goes_where_nothing_needs_one(
    pool: Pool, frozen: tuple[int, ...], back: tuple[bool, ...]
) -> None:
    """``back``: which stages have a backward pass that computes something."""
    units, widths, words = ((0, 1), (2,), (3, 4, 5, 6)), (5, 4), 2 * 4
    found = pool.run(with_frozen, frozen, ranks=3)
    for stage, (distance, events, received) in enumerate(found):
        assert distance < EXACT
        done = [int(event[-1]) for event in events if event.startswith(("done", "complete"))]
        assert done == [*reversed(units[stage])] * 2
        assert [int(event[-1]) for event in events if event.startswith("back")] == done, "each is entered, then done"
        forward = widths[stage - 1] if stage else 0
        gradient = widths[stage] if stage < 2 and back[stage] else 0
        assert received == words * (forward + gradient), f"stage {stage}"


def forward_passes(world: World, home: Sequence[int], micro_batches: int) -> tuple[float, list[list[float]], list[str]]:
    log = Log()
    starts = (0, 2, 3, 5)[: len(home)]
    pipeline = Pipeline(world, small_task(small_net()), starts, breadth_first(home, 1), log.handlers)
    program = Pipeline._lower(forward_only(home, micro_batches), world.rank, train=False)
    batches = small_batches(micro_batches, 4)
    loss = pipeline.executor.run(program, batches, whole)
    outputs = pipeline.executor.outputs(program, batches, whole)
    assert not loss.requires_grad
    assert all(not output.requires_grad for output in outputs)
    return loss.item(), [output.flatten().tolist() for output in outputs], log.events


@pytest.mark.parametrize("home", [(0,), (0, 1), (0, 1, 2, 3), (0, 1, 1, 0)])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_forward_passes_alone_sum_the_loss_or_give_the_outputs(
    pool: Pool, home: tuple[int, ...], micro_batches: int
) -> None:
    found = pool.run(forward_passes, home, micro_batches, ranks=max(home) + 1)
    net, batches = small_net(), small_batches(micro_batches, 4)
    expected = [net(batch["inputs"]) for batch in batches]
    loss = sum((out - batch["targets"]).square().sum().item() for out, batch in zip(expected, batches, strict=True))
    for rank, (total, outputs, events) in enumerate(found):
        if rank == home[-1]:
            assert total == pytest.approx(loss, rel=EXACT)
            assert outputs == [pytest.approx(one.flatten().tolist(), rel=EXACT) for one in expected]
        else:
            assert (total, outputs) == (0, [])
        assert {event.split()[0] for event in events} == {"enter", "leave"}


def words_received(world: World, schedule: Schedule, micro_batches: int) -> list[tuple[float, int, int]]:
    """Words of boundaries, their messages, and headers, of each of three steps; and of two evaluations."""
    pipeline = Pipeline(world, small_task(small_net()), STARTS[world.size], schedule(world.size, micro_batches))
    found = []

    def count() -> None:
        found.append(
            (
                world.ledger.words("world", "boundary"),
                world.ledger.calls("world", "boundary"),
                world.ledger.calls("world", "boundary header"),
            )
        )
        world.ledger.clear()

    world.ledger.clear()
    for samples in (4, 4, 5, 4):
        pipeline.train(small_batches(micro_batches, samples))
        count()
    program = Pipeline._lower(forward_only(placement(schedule(world.size, 1)), micro_batches), world.rank, train=False)
    for _ in range(2):
        pipeline.executor.run(program, small_batches(micro_batches, 4), whole)
        count()
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_boundary_a_micro_batch_moves_each_way_and_a_header_with_each_new_shape(
    pool: Pool, schedule: Schedule
) -> None:
    micro_batches, widths = 3, (5, 4, 6)
    for rank, found in enumerate(pool.run(words_received, schedule, micro_batches)):
        before = widths[rank - 1] if rank else 0
        after = widths[rank] if rank < 3 else 0
        neighbours = (rank > 0) + (rank < 3)
        header = int(rank > 0)
        steps = [(4, header), (4, 0), (5, header), (4, 0)]
        expected = [
            (micro_batches * samples * (before + after), micro_batches * neighbours, headers)
            for samples, headers in steps
        ]
        expected += [(micro_batches * 4 * before, micro_batches * header, headers) for headers in (header, 0)]
        assert found == expected, f"rank {rank}"
