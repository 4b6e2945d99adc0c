"""What a rank lends is read where it is: it stays as it was until it has been, whatever becomes of it afterwards."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.comm.backends import neighbour
from shoal.comm.backends.links import LENT
from shoal.comm.backends.regions import Regions
from shoal.comm.collectives import (
    all_reduce,
    barrier,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_exchange,
    start_reduce,
    start_reduce_scatter,
)
from shoal.comm.world import World
from shoal.errors import RankFailed
from shoal.train.pool import Pool

LONG = 3 * LENT // 4 + 17
"""Elements, float32 or larger: several pieces, none of them a whole one at the end."""


def memory(world: World, numel: int, dtype: torch.dtype, mapped: bool) -> torch.Tensor:
    return world.zeros(numel, dtype=dtype) if mapped else torch.zeros(numel, dtype=dtype)


def every_collective(world: World, dtype: torch.dtype, mapped: bool) -> list[bool]:
    """Beside what one process makes of the same numbers."""
    size, me, group = world.size, world.rank, world.everyone
    each = LONG // size * 4
    of_rank = [
        torch.randint(-50, 50, (size * each,), generator=torch.Generator().manual_seed(one)).to(dtype)
        for one in range(size)
    ]
    total, right = sum(of_rank[1:], of_rank[0]), []
    mine = memory(world, size * each, dtype, mapped)
    own = mine[me * each : (me + 1) * each]

    def check(what: torch.Tensor, expected: torch.Tensor) -> None:
        right.append(torch.equal(what, expected))
        mine.copy_(of_rank[me])

    mine.copy_(of_rank[me])
    start_all_reduce(mine, group, "x").wait()
    check(mine, total)
    start_all_reduce(mine, group, "x", "max").wait()
    check(mine, torch.stack(of_rank).amax(0))
    start_reduce_scatter(own, mine, group, "x").wait()
    check(own, total[me * each : (me + 1) * each])
    start_all_gather(mine, own, group, "x").wait()
    check(mine, torch.cat([one[place * each : (place + 1) * each] for place, one in enumerate(of_rank)]))
    start_broadcast(mine, group, "x", size - 1).wait()
    check(mine, of_rank[-1])
    start_reduce(mine, group, "x", 0).wait()
    check(mine if me == 0 else total, total)
    given = [0 if to == me else each - to for to in range(size)]
    taken = [0 if source == me else each - me for source in range(size)]
    into = memory(world, sum(taken), dtype, mapped)
    start_exchange(into, taken, mine[: sum(given)], given, group, "x").wait()
    starts = [sum(0 if to == source else each - to for to in range(me)) for source in range(size)]
    parts = [of_rank[one][starts[one] : starts[one] + each - me] for one in range(size) if one != me]
    check(into, torch.cat(parts))
    return right


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_of_what_is_lent(pool: Pool, dtype: torch.dtype, ranks: int, mapped: bool) -> None:
    assert pool.run(every_collective, dtype, mapped, ranks=ranks, timeout_s=60) == [[True] * 7] * ranks


def hasty(world: World, mapped: bool) -> list[float]:
    """The first rank writes to what it has given as soon as it may; the last comes late."""
    found = []
    for number in range(3):
        mine = memory(world, LONG * world.size, torch.float32, mapped).fill_(number + world.rank)
        whole = torch.empty(LONG * world.size * world.size)
        if world.rank == world.size - 1:
            time.sleep(0.1)
        start_all_gather(whole, mine, world.everyone, "x").wait()
        start_all_reduce(mine, world.everyone, "x").wait()
        total = mine[-1].item()
        mine.fill_(-100.0)
        barrier(world.everyone)
        found += [whole[-1].item(), whole[0].item(), total]
    return found


@pytest.mark.parametrize("mapped", [True, False])
def test_who_has_waited_may_write_to_it(pool: Pool, mapped: bool) -> None:
    expected = [value for number in range(3) for value in (number + 2, number, 3 * number + 3)]
    assert pool.run(hasty, mapped, ranks=3, timeout_s=30) == [expected] * 3


def one_after_another(world: World) -> list[float]:
    """Regions that come and go, of other sizes, under the same descriptors."""
    found, links = [], world._links
    assert links is not None
    for number in range(6):
        mine = world.zeros(LONG * (1 + number % 3), dtype=torch.float32).fill_(number)
        start_all_reduce(mine, world.everyone, "x").wait()
        found.append(mine.sum().item() / len(mine))
        del mine
    barrier(world.everyone)
    held: Any = next(iter(links._links.values())).memory
    return [*found, len(held._mapped)]


def test_a_region_that_has_gone_is_not_read_again(pool: Pool) -> None:
    # The last one may still be mapped, as nothing has been lent since it went, and the token that was first.
    for *found, mapped in pool.run(one_after_another, ranks=2, timeout_s=30):
        assert found == [0, 2, 4, 6, 8, 10]
        assert mapped <= 2


def test_the_bytes_of_a_region_are_found_and_no_others() -> None:
    regions = Regions()
    one, other = regions.allocate(1000), regions.allocate(64)
    start = one.ctypes.data
    descriptor = os.open("/dev/null", os.O_RDONLY)
    os.close(descriptor)
    first, second = regions.find(start, 1000), regions.find(other.ctypes.data + 3, 61)
    assert first is not None
    assert second is not None
    assert (first[1], second[1]) == (0, 3)
    assert first[0] != second[0]
    assert regions.find(start + 999, 2) is None
    assert regions.find(start - 1, 1) is None
    assert regions.ended() == []
    part = one[10:20]
    del one
    assert regions.find(start + 10, 10) == (first[0], 10)
    del part
    assert regions.ended() == [first[0]]
    assert regions.find(start, 1000) is None


def test_a_region_where_another_has_been_is_another() -> None:
    regions = Regions()
    starts, gone = set(), []
    for number in range(20):
        one = regions.allocate(1 << 20)
        starts.add(one.ctypes.data)
        found = regions.find(one.ctypes.data, 1 << 20)
        assert found is not None
        gone.append(found[0])
        del one
        if number % 3 == 2:
            assert regions.ended() == gone
            gone = []
    assert len(starts) < 20, "none has been where another was"
    assert regions.ended() == gone
    assert not regions._at


def hidden(world: World, meeting: str, what: str) -> list[object]:
    """A world in which one rank cannot read the memory of others, or has nothing to map."""
    read, allocate = neighbour._READ, Regions.allocate

    def refuse(*_: object) -> Any:
        raise OSError(38, "Function not implemented")

    try:
        if world.rank == 1 and what == "read":
            neighbour._READ = None
        if world.rank == 1 and what == "map":
            Regions.allocate = refuse  # type: ignore[method-assign]
        with World(world.rank, world.size, dist.FileStore(meeting, world.size), timeout_s=20) as inner:
            assert inner._links is not None
            mine = inner.zeros(LONG, dtype=torch.float32).fill_(1)
            all_reduce(mine, inner.everyone, "x")
            return [inner.carrier, inner._links.lends(1 << 30), mine[-1].item()]
    finally:
        neighbour._READ, Regions.allocate = read, allocate  # type: ignore[method-assign]


@pytest.mark.parametrize(("what", "lends"), [("nothing", True), ("read", False), ("map", False)])
def test_where_one_rank_cannot_read_others_nobody_lends(pool: Pool, tmp_path: Path, what: str, lends: bool) -> None:
    assert pool.run(hidden, str(tmp_path / "store"), what, ranks=3) == [["shared", lends, 3.0]] * 3


def test_whoever_has_another_token_is_not_read() -> None:
    mine = neighbour.Token(Regions())
    assert neighbour.found(0, mine.text) is not None
    process, address, region, value = mine.text.split()
    for other in (f"{process} {address} {region} {'0' * 32}", f"1999999999 {address} {region} {value}"):
        assert neighbour.found(0, other) is None


def killed_while_lending(world: World) -> None:
    mine = torch.ones(LONG)
    pending = start_all_reduce(mine, world.everyone, "gradients")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pending.wait()


def test_a_lender_that_is_killed_ends_the_run() -> None:
    with Pool(3) as pool:
        start = time.monotonic()
        with pytest.raises(RankFailed, match="rank 1"):
            pool.run(killed_while_lending, timeout_s=60)
        assert time.monotonic() - start < 20


def late_reader(world: World) -> float:
    """Of three ranks the second has read all that the first lent, and ends, long before the third has."""
    if world.rank == 2:
        time.sleep(0.4)
    mine, whole = torch.full((LONG,), float(world.rank)), torch.empty(3 * LONG)
    pending = start_broadcast(mine if world.rank == 0 else whole[:LONG], world.everyone, "x")
    pending.wait()
    return float((mine if world.rank == 0 else whole[:LONG])[-1].item())


def test_a_reader_that_has_read_may_end(pool: Pool) -> None:
    assert pool.run(late_reader, ranks=3, timeout_s=20) == [0.0] * 3
