"""A rank of a world that has no other: everything is counted, and nothing is waited for."""

from __future__ import annotations

import torch

from shoal.comm.alone import Alone
from shoal.comm.collectives import all_reduce, start_all_gather, start_exchange, start_reduce_scatter
from shoal.comm.ledger import Entry
from shoal.comm.point_to_point import start_receive, start_send


def test_collectives_are_counted_as_those_of_a_world_with_others() -> None:
    with Alone(2, 4) as world:
        group, flat = world.everyone, torch.zeros(8, dtype=torch.bfloat16)
        all_reduce(flat, group, "gradients")
        start_reduce_scatter(flat[4:6], flat, group, "gradients").wait()
        start_all_gather(flat, flat[4:6], group, "parameters").wait()
        start_exchange(flat[:3], [1, 2, 0, 0], flat, [3, 0, 0, 5], group, "tokens").wait()
        start_receive(torch.zeros(5), group, 1, 7, "boundary").wait()
        assert world.ledger.entries() == [
            Entry("all_gather", "world", "parameters", 1, 6.0, 12.0),
            Entry("all_reduce", "world", "gradients", 1, 12.0, 24.0),
            Entry("exchange", "world", "tokens", 1, 3.0, 6.0),
            Entry("message", "world", "boundary", 1, 5.0, 20.0),
            Entry("reduce_scatter", "world", "gradients", 1, 6.0, 12.0),
        ]


def test_whole_numbers_are_shown_to_who_must_know_and_filled_in_by_who_does() -> None:
    sent: list[list[int]] = []
    with Alone(1, 4, sent=lambda one: sent.append(one.tolist()), wanted=lambda one: one.fill_(9)) as world:
        start_send(torch.tensor([3, 4]), world.everyone, 2, 0).wait()
        start_send(torch.zeros(2), world.everyone, 2, 0).wait()
        into, values = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
        start_receive(into, world.everyone, 0, 0, "boundary header").wait()
        start_receive(values, world.everyone, 0, 0, "boundary").wait()
    assert sent == [[3, 4]]
    assert (into.tolist(), values.tolist()) == ([9, 9], [0.0, 0.0])


def test_a_world_of_many_costs_no_more_than_the_ranks_that_are_named() -> None:
    with Alone(16_383, 16_384) as world:
        group = world.group((16_376, 16_383), "tp")
        assert (group.index, group.size, world.carrier) == (1, 2, "nobody")
        assert group.backend is world.group((16_376, 16_383), "tp").backend
