"""Whole steps over a transport without tags, which moves all messages of a channel between two ranks in one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from in_order import Network, Stuck
from pipeline_ranks import Log, Pipeline, furthest, one_process, small_batches, small_net, small_task
from torch import Tensor

from shoal.pipeline.lines import Lines
from shoal.pipeline.program import Programs
from shoal.pipeline.schedules.forward_only import forward_only
from shoal.pipeline.schedules.gpipe import gpipe
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b

Schedule = Callable[[int, int], Programs]
STARTS = {2: (0, 3), 3: (0, 2, 3), 4: (0, 1, 3, 5)}
EXACT = 1e-12


def whole(batch: object) -> object:
    return batch


def lines_over(net: Network, rank: int) -> Lines:
    return Lines.over(lambda channel: net.group(rank, channel))


def pipelines(net: Network, schedule: Schedule, ranks: int, micro_batches: int) -> list[Pipeline]:
    passes = schedule(ranks, micro_batches)
    return [Pipeline(lines_over(net, rank), small_task(small_net()), STARTS[ranks], passes) for rank in range(ranks)]


def train(net: Network, stages: Sequence[Pipeline], batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]:
    """One step. How far the loss and the gradients of all ranks are from those of one process."""
    for one in stages:
        one.task.module.zero_grad()
    loss = sum(net.run(lambda rank: stages[rank].train(batches)))
    expected, grads = one_process(small_task(small_net()), batches, whole)
    found = {name: grad for one in stages for name, grad in one.gradients().items()}
    return abs(loss / expected - 1), furthest(found, grads)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_each_channel_has_one_order(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    """Also where headers come between activations, because shapes are new in the middle of a step; in a step without
    any; and in evaluation."""
    net = Network(ranks)
    stages = pipelines(net, schedule, ranks, micro_batches)
    same = small_batches(micro_batches, 4)
    mixed = [small_batches(1, 4 + number % 3)[0] for number in range(micro_batches)]
    for batches in (same, mixed, mixed):
        assert max(train(net, stages, batches)) < EXACT
    program = [Pipeline._lower(forward_only(range(ranks), micro_batches), rank, train=False) for rank in range(ranks)]
    losses = net.run(lambda rank: stages[rank].executor.run(program[rank], mixed, whole).item())
    assert sum(losses) == pytest.approx(one_process(small_task(small_net()), mixed, whole)[0], rel=EXACT)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_one_channel_for_both_directions_would_hold_up_all_but_one_micro_batch(
    schedule: Schedule, ranks: int, micro_batches: int
) -> None:
    net = Network(ranks, channels=False)
    stages, batches = pipelines(net, schedule, ranks, micro_batches), small_batches(micro_batches, 4)
    if micro_batches == 1:
        assert max(train(net, stages, batches)) < EXACT
    else:
        with pytest.raises(Stuck):
            train(net, stages, batches)


def test_ranks_that_connect_in_their_first_messages_would_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank starts to receive a gradient while it still has an activation to send."""
    monkeypatch.setattr(Lines, "connect", lambda *_: None)
    net = Network(2)
    with pytest.raises(Stuck):
        train(net, pipelines(net, gpipe, 2, 2), small_batches(2, 4))


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_no_message_is_under_way_when_the_norm_is_taken(schedule: Schedule) -> None:
    """An error there, or in the update, leaves none for the next step to meet."""
    net, left = Network(3), []

    def stage(rank: int) -> Pipeline:
        handlers = replace(Log().handlers, norm=lambda _: left.append(net.left(rank)))
        return Pipeline(lines_over(net, rank), small_task(small_net()), STARTS[3], schedule(3, 4), handlers)

    train(net, [stage(rank) for rank in range(3)], small_batches(4, 4))
    assert left == [0, 0, 0]
