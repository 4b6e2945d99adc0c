from __future__ import annotations

import time

import pytest
import torch

from shoal.comm.backends import gloo
from shoal.comm.collectives import (
    start_all_gather,
    start_reduce,
    start_reduce_scatter,
)
from shoal.comm.ledger import Ledger
from shoal.comm.point_to_point import MESSAGE_TAGS, connect, start_receive, start_send
from shoal.comm.world import Group, World
from shoal.errors import RankFailed
from shoal.train.pool import Pool


def around(world: World) -> list[float]:
    """Every rank sends to the next and receives from the one before, sends first: nobody waits for a send."""
    group = world.everyone
    mine, got = torch.full((2, 3), float(world.rank)), torch.empty(2, 3)
    sent = start_send(mine, group, (world.rank + 1) % world.size, 7)
    start_receive(got, group, (world.rank - 1) % world.size, 7, "boundary").wait()
    sent.wait()
    sent.wait()
    ledger = world.ledger
    return [got[1, 2].item(), ledger.words("world", "boundary"), ledger.calls(purpose="boundary"), ledger.calls()]


def test_messages_are_not_waited_for_and_count_where_they_are_received(pool: Pool) -> None:
    assert pool.run(around, ranks=3) == [[2, 6, 1, 1], [0, 6, 1, 1], [1, 6, 1, 1]]


def by_tag(world: World) -> list[int]:
    """Ranks 1 and 3 are places 0 and 1 of their group; tags are received in another order than they are sent."""
    if world.rank in (0, 2):
        return []
    group = world.group((1, 3), "pp")
    if world.rank == 1:
        sent = [start_send(torch.tensor([10 * tag + n]), group, 1, tag) for n, tag in enumerate((5, 4, 4, 6))]
        for pending in sent:
            pending.wait()
        return []
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    awaited = [start_receive(one, group, 0, tag, "boundary") for one, tag in zip(found, (6, 4, 5, 4), strict=True)]
    for pending in reversed(awaited):
        pending.wait()
    return [int(one.item()) for one in found]


def test_messages_of_one_tag_keep_their_order_and_tags_their_own(pool: Pool) -> None:
    assert pool.run(by_tag)[3] == [63, 41, 50, 42]


def of_any_kind(world: World) -> list[bool]:
    """Whether tensors of other dtypes, of no elements and of no dims arrive as they were sent."""
    tensors = [torch.arange(6).view(2, 3).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)]
    tensors += [torch.empty(0, 4), torch.tensor(3.0), torch.tensor([2**40])]
    found = []
    for tag, tensor in enumerate(tensors):
        if world.rank == 0:
            start_send(tensor, world.everyone, 1, tag).wait()
        else:
            got = torch.zeros_like(tensor)
            start_receive(got, world.everyone, 0, tag, "boundary").wait()
            found.append(torch.equal(got, tensor))
    return found


def test_tensors_of_any_dtype_and_size_arrive_as_they_were_sent(pool: Pool) -> None:
    assert pool.run(of_any_kind, ranks=2) == [[], [True] * 6]


def chained(world: World) -> list[int]:
    """Each way along the chain is opened from its start; what is sent over it then comes first."""
    group = world.everyone
    for source in range(world.size - 1):
        if world.rank in (source, source + 1):
            connect(group, source, source + 1, world.device)
    got = torch.zeros(1, dtype=torch.int64)
    tag = MESSAGE_TAGS.start
    if world.rank > 0:
        start_receive(got, group, world.rank - 1, tag, "boundary").wait()
    if world.rank < world.size - 1:
        start_send(got + 7, group, world.rank + 1, tag).wait()
    return [int(got.item()), world.ledger.calls()]


def test_opening_a_way_takes_no_place_among_its_messages_and_moves_no_words(pool: Pool) -> None:
    assert pool.run(chained, ranks=3) == [[0, 0], [7, 1], [14, 1]]


def test_the_tag_of_exchanges_is_not_for_messages() -> None:
    group = Group((0, 1), "pp", 0, Ledger(), {((0, 1), ""): object()})
    with pytest.raises(AssertionError, match="is for exchanges"):
        start_send(torch.zeros(1), group, 1, MESSAGE_TAGS.stop)


def silent(world: World) -> None:
    if world.rank == 0:
        time.sleep(3)
    else:
        start_receive(torch.zeros(1), world.everyone, 0, 1, "boundary").wait()


def test_waiting_for_what_never_comes_ends_at_the_time_out_of_the_group(pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 raised:(.|\n)*Timed out"):
        pool.run(silent, ranks=2, timeout_s=1)


def staged(world: World) -> tuple[list[float], ...]:
    """A message and the collectives made of messages, through memory of their own as between GPUs under gloo."""
    gloo._staged = lambda tensor: True  # of this process; the pool ends with the test
    (first, *_), group = around(world), world.everyone
    parts, sums = torch.empty(world.size), torch.empty(1)
    start_all_gather(parts, torch.tensor([float(world.rank)]), group, "parameters").wait()
    start_reduce_scatter(sums, torch.arange(world.size) * 10.0 ** (world.rank + 1), group, "gradients").wait()
    total = torch.tensor([float(world.rank)])
    start_reduce(total, group, "gradients", 2).wait()
    return [first], parts.tolist(), sums.tolist(), total.tolist()


def test_messages_may_be_staged() -> None:
    with Pool(3) as pool:
        found = pool.run(staged, ranks=3, share=False)
    assert [one[0] for one in found] == [[2], [0], [1]]
    assert [one[1] for one in found] == [[0, 1, 2]] * 3
    assert [one[2] for one in found] == [[0], [1110], [2220]]
    assert found[2][3] == [3]
