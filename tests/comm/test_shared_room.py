"""Ranks whose memory for messages is full: whatever the order in which they send, ask and wait, all goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.comm.backends import meeting as meeting_module
from shoal.comm.backends.links import Links
from shoal.comm.backends.shared import SharedGroup
from shoal.comm.collectives import barrier
from shoal.comm.world import World
from shoal.train.pool import Pool

ROOM = meeting_module.SMALLEST


def little(world: World, meeting: str, task: str, lends: bool) -> list[float]:
    """``task`` over links whose arenas have room for no more than they must, whether or not they lend besides."""
    store, largest = dist.FileStore(meeting, world.size), meeting_module.LARGEST
    meeting_module.LARGEST = meeting_module.SMALLEST
    try:
        links = Links.join(world.rank, range(world.size), store, 20.0)
    finally:
        meeting_module.LARGEST = largest
    assert links is not None
    assert links._lends
    links._lends = lends
    found = TASKS[task](links)
    barrier(world.everyone)
    assert not any([links._wanted, links._arrived, links._unsent, links._lent, *links._held.values()])
    assert len(links._arena.occupied) <= 64  # of what has been read lately, its owner is told with the next message
    links.close()
    return found


def everything_at_once(links: Links) -> list[float]:
    """Messages of many chunks to everyone, received in the opposite order to that in which they are sent, while sums
    over all ranks and over pairs are waited for in another order by each."""
    everyone = SharedGroup(links, links.ranks, "")
    me, size = everyone.rank, everyone.size
    elements = 3 * ROOM // 16 + 5
    others = [rank for rank in range(size) if rank != me]
    sums = [torch.full((elements,), float(me + number)) for number in range(3)]
    works = [everyone.all_reduce(one, "sum") for one in sums]
    sent = [everyone.send(torch.full((elements,), float(10 * me + tag)), to, tag) for to in others for tag in range(2)]
    pair = SharedGroup(links, sorted((me, me ^ 1)), "")
    halves = torch.full((elements,), float(me))
    works.append(pair.all_reduce(halves, "max"))
    works = works if me % 2 else works[::-1]
    works[0].wait()
    came = {(source, tag): torch.zeros(elements) for tag in (1, 0) for source in others[::-1]}
    for (source, tag), one in came.items():
        everyone.receive(one, source, tag).wait()
    for work in [*works, *sent]:
        work.wait()
        work.wait()
    assert all((one == 10 * source + tag).all() for (source, tag), one in came.items())
    assert all((one == one[0]).all() for one in [*sums, halves])
    return [*(one[0].item() for one in sums), halves[0].item()]


def nobody_asks_yet(links: Links) -> list[float]:
    """The first rank sends far more than fits, in an order in which the last comes first for the second."""
    group = SharedGroup(links, links.ranks, "")
    elements = 3 * ROOM // 16
    if group.rank == 0:
        sent = [group.send(torch.full((elements,), float(tag)), 1, tag) for tag in range(6)]
        for work in sent:
            work.wait()
        return []
    if group.rank > 1:
        return []
    found = [torch.zeros(elements) for _ in range(6)]
    for tag in reversed(range(6)):
        group.receive(found[tag], 0, tag).wait()
    return [one[-1].item() for one in found]


def full_again(links: Links) -> list[float]:
    """The first rank's arena is full twice over before the last, which waits for a message behind a sum, joins that."""
    group = SharedGroup(links, links.ranks, "")
    total, message = torch.ones(12 * ROOM // 16 + 5), torch.ones(4)
    if group.rank == group.size - 1:
        group.receive(message, 0, 0).wait()
    work = group.all_reduce(total, "sum")
    if group.rank == 0:
        group.send(message, group.size - 1, 0).wait()
    work.wait()
    return [total[0].item(), total[-1].item()]


def round_a_table(links: Links) -> list[float]:
    """Each rank has a large sum with either neighbour, begun with the next one's."""
    me, size = links.rank, len(links.ranks)
    pairs = [sorted((me, (me + step) % size)) for step in (1, -1)]
    sums = [torch.full((12 * ROOM // 16,), float(me)) for _ in pairs]
    works = [SharedGroup(links, pair, "").all_reduce(one, "sum") for pair, one in zip(pairs, sums, strict=True)]
    for work in works:
        work.wait()
    return [one[-1].item() for one in sums]


TASKS = {
    "everything": everything_at_once,
    "unasked": nobody_asks_yet,
    "full again": full_again,
    "round a table": round_a_table,
}


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("everything", [[6, 10, 14, 1], [6, 10, 14, 1], [6, 10, 14, 3], [6, 10, 14, 3]]),
        ("unasked", [[], [0, 1, 2, 3, 4, 5], [], []]),
        ("full again", [[4, 4]] * 4),
        ("round a table", [[1, 3], [3, 1], [5, 3], [3, 5]]),
    ],
)
def test_arenas_that_are_full_stop_nobody(
    pool: Pool, tmp_path: Path, task: str, expected: list[list[float]], lends: bool
) -> None:
    assert pool.run(little, str(tmp_path / "store"), task, lends, timeout_s=30) == expected
