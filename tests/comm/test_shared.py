"""Memory that ranks share: what only it can do wrong."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shoal.comm import world as world_module
from shoal.comm.backends.arena import ALIGNMENT, Arena
from shoal.comm.backends.links import CHUNK
from shoal.comm.backends.meeting import FOLDER
from shoal.comm.collectives import all_reduce, barrier, start_all_gather, start_all_reduce
from shoal.comm.point_to_point import start_receive, start_send
from shoal.comm.world import World
from shoal.errors import RankFailed
from shoal.train.pool import Pool

# ---- the arena


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(os.open(tmp_path / "arena", os.O_RDWR | os.O_CREAT), 10 * ALIGNMENT, ALIGNMENT)


def bytes_of(count: int, value: int = 1) -> np.ndarray:
    return np.full(count, value, dtype=np.uint8)


def test_what_is_read_by_all_makes_room_again(arena: Arena) -> None:
    places = [arena.place(bytes_of(3 * ALIGNMENT - 1, number), 2) for number in range(3)]
    assert places == [0, 3 * ALIGNMENT, 6 * ALIGNMENT]
    assert arena.place(bytes_of(2 * ALIGNMENT), 1) is None
    assert arena.place(bytes_of(ALIGNMENT, 9), 1) == 9 * ALIGNMENT
    arena.read(3 * ALIGNMENT)
    assert arena.place(bytes_of(ALIGNMENT), 1) is None  # one of two has read it
    arena.read(3 * ALIGNMENT)
    assert arena.place(bytes_of(ALIGNMENT, 7), 1) == 3 * ALIGNMENT
    assert [int(arena.bytes[place]) for place in (0, 3 * ALIGNMENT, 6 * ALIGNMENT, 9 * ALIGNMENT)] == [0, 7, 2, 9]


def test_whatever_the_order_in_which_it_is_read_it_becomes_one_piece(arena: Arena) -> None:
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 3, 0, 4, 2], [2, 0, 4, 1, 3]):
        places = [arena.place(bytes_of(2 * ALIGNMENT), 1) for _ in range(5)]
        assert None not in places
        for number in order:
            arena.read(places[number] or 0)
        whole = arena.place(bytes_of(10 * ALIGNMENT), 1)
        assert whole == 0
        arena.read(whole)


def test_where_the_system_has_no_more_to_give_the_arena_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = 4 * ALIGNMENT

    def allocate(_: int, start: int, length: int) -> None:
        if start + length > given:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    arena = Arena(os.open(tmp_path / "arena", os.O_RDWR | os.O_CREAT), 1000 * ALIGNMENT, ALIGNMENT)
    assert arena.place(bytes_of(3 * ALIGNMENT), 1) == 0
    assert arena.place(bytes_of(2 * ALIGNMENT), 1) is None
    assert arena.place(bytes_of(ALIGNMENT), 1) == 3 * ALIGNMENT
    arena.read(0)
    assert arena.place(bytes_of(2 * ALIGNMENT), 1) == 0
    with pytest.raises(OSError, match="No space"):
        Arena(os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT), 1000 * ALIGNMENT, 5 * ALIGNMENT)


# ---- pipes


def many_words(world: World) -> list[float]:
    """What has been waited for arrives, even if its sender then does something else for long, or ends."""
    count, size = 300, 250
    if world.rank == 0:
        for number in range(count):
            start_send(torch.full((size,), float(number)), world.everyone, 1, 0).wait()
        return [float(count)]
    time.sleep(0.5)
    found = []
    for _ in range(count):
        got = torch.zeros(size)
        start_receive(got, world.everyone, 0, 0, "x").wait()
        found.append(got[-1].item())
    return [float(found == list(range(count)))]


def test_more_words_than_a_pipe_holds_all_arrive(pool: Pool) -> None:
    assert pool.run(many_words, ranks=2, timeout_s=30) == [[300], [1]]


def sizes(world: World, sent: list[int], asked: list[int]) -> str:
    try:
        if world.rank == 0:
            for size in sent:
                start_send(torch.ones(size), world.everyone, 1, 0).wait()
            barrier(world.everyone)
        else:
            for size in asked:
                start_receive(torch.zeros(size), world.everyone, 0, 0, "x").wait()
    except RuntimeError as error:
        return str(error)
    return "agree"


@pytest.mark.parametrize(("sent", "asked"), [([2, 1], [3]), ([2, 4], [3, 3]), ([3], [2]), ([600_000], [300_000])])
def test_a_message_of_another_size_is_an_error_that_names_both(pool: Pool, sent: list[int], asked: list[int]) -> None:
    said = pool.run(sizes, sent, asked, ranks=2, timeout_s=5)[1]
    assert said == f"rank 0 sends {4 * sent[0]} bytes where {4 * asked[0]} are expected"


# ---- what cannot be


def leave_one(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(torch.ones(300_000), world.everyone, "gradients")


def test_a_rank_that_is_killed_is_named_at_once_and_leaves_nothing_behind() -> None:
    with Pool(3) as pool:
        before, start = set(os.listdir(FOLDER)), time.monotonic()
        with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
            pool.run(leave_one, timeout_s=60)
        assert time.monotonic() - start < 20
        assert {name for name in set(os.listdir(FOLDER)) - before if name.startswith("shoal-")} == set()


def leave_behind(world: World) -> None:
    """A process of its own keeps nothing open that would hide the death of the one it was forked from."""
    if world.rank == 1:
        if not os.fork():
            time.sleep(15)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(torch.ones(3), world.everyone, "gradients")


def test_a_child_process_does_not_hide_that_its_parent_was_killed() -> None:
    with Pool(2) as pool:
        start = time.monotonic()
        with pytest.raises(RankFailed, match=r"connection to rank 1 was closed by peer|rank 1 was killed"):
            pool.run(leave_behind, ranks=2, timeout_s=60)
        assert time.monotonic() - start < 10


def test_what_was_left_by_a_process_that_never_met_the_others_is_removed(pool: Pool) -> None:
    stale = Path(tempfile.mkdtemp(prefix="shoal-", dir=FOLDER))
    (stale / "arena").write_bytes(b"")
    locked = Path(tempfile.mkdtemp(prefix="shoal-", dir=FOLDER))
    with (locked / "arena").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        pool.run(outlive, ranks=1)
        assert pool.run(resized, ranks=2) == [0, 0]
        assert (stale.exists(), locked.exists()) == (False, True)
    shutil.rmtree(locked)


def last_word_late(world: World) -> str:
    """Of three ranks the second tells the last of its share of a sum when the first has it already, and has ended."""
    links: Any = world._links
    if world.rank == 1:
        write = links._write

        def slowly(rank: int, message: bytes = b"", posted: Any = None) -> None:
            if rank == 2 and posted is not None and len(message) > 5000:
                time.sleep(0.3)
            write(rank, message, posted)

        links._write = slowly
    ones = torch.ones(30_000)
    all_reduce(ones, world.everyone, "gradients")
    return f"{ones[-1].item():g}"


def test_who_has_given_all_may_end(pool: Pool) -> None:
    for _ in range(3):
        assert pool.run(last_word_late, ranks=3, timeout_s=20) == ["3"] * 3


def outlive(world: World) -> list[str]:
    """A rank that ends while others wait for it is told apart from one that is late."""
    if world.rank == 0:
        return []
    if world.rank == 2:
        time.sleep(0.2)
    got, said = torch.zeros(3), ""
    try:
        start_receive(got, world.everyone, 0, 5, "boundary").wait()
    except RuntimeError as error:
        said = str(error)
    return [said]


def test_who_waits_for_a_rank_that_has_ended_is_told_so(pool: Pool) -> None:
    said = "the connection to rank 0 was closed by peer"
    assert pool.run(outlive, ranks=3, timeout_s=30) == [[], [said], [said]]


def forced(world: World, meeting: str, room: int) -> str:
    """What carries messages in a world whose memory has ``room`` bytes."""
    seen = os.statvfs(FOLDER)

    class Small:
        f_bavail, f_frsize = room // seen.f_frsize, seen.f_frsize

    real, os.statvfs = os.statvfs, lambda _: Small() if world.rank == 1 else seen  # type: ignore[assignment]
    try:
        with World(world.rank, world.size, dist.FileStore(meeting, world.size), timeout_s=20) as inner:
            ones = torch.ones(1)
            all_reduce(ones, inner.everyone, "test")
            return f"{inner.carrier} {ones.item():g}"
    finally:
        os.statvfs = real


def test_where_one_rank_lacks_memory_all_use_gloo(pool: Pool, tmp_path: Path) -> None:
    before = set(os.listdir(FOLDER))
    assert pool.run(forced, str(tmp_path / "a"), 8 << 20, ranks=3) == ["gloo 3"] * 3
    assert pool.run(forced, str(tmp_path / "b"), 1 << 30, ranks=3) == ["shared 3"] * 3
    assert not [name for name in set(os.listdir(FOLDER)) - before if name.startswith("shoal-")]


def of_two_machines(world: World, meeting: str) -> list[str]:
    """Ranks 0 and 1 on one machine, 2 and 3 on another."""
    real, world_module.machine = world_module.machine, lambda: f"machine {world.rank // 2}"
    try:
        with World(world.rank, world.size, dist.FileStore(meeting, world.size), timeout_s=20) as inner:
            neighbours = (0, 1) if world.rank < 2 else (2, 3)
            sums = []
            for ranks in (tuple(range(4)), neighbours):
                one = torch.tensor([float(world.rank)])
                all_reduce(one, inner.group(ranks, "dp"), "test")
                sums.append(f"{type(inner.group(ranks, 'dp').backend).__name__} {one.item():g}")
            return sums
    finally:
        world_module.machine = real


def test_between_machines_there_is_gloo_and_inside_memory(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(of_two_machines, str(tmp_path / "store"))
    assert found == [["Beside 6", f"SharedGroup {pair:g}"] for pair in (1, 1, 5, 5)]


def in_a_cycle(world: World, meeting: str) -> float:
    """Two machines of three ranks. 0 waits for 3, which waits for its machine's sum, to which 4 has to give its share,
    which waits for 1, which waits for its machine's sum, to which 0 has to give its share."""
    real, world_module.machine = world_module.machine, lambda: f"machine {world.rank // 3}"
    try:
        with World(world.rank, world.size, dist.FileStore(meeting, world.size), timeout_s=20) as inner:
            here = inner.group((0, 1, 2) if world.rank < 3 else (3, 4, 5), "dp")
            across = inner.group((world.rank % 3, world.rank % 3 + 3), "pp")
            total, message = torch.ones(30_000), torch.ones(4)
            pending = start_all_reduce(total, here, "gradients")
            if world.rank in (0, 4):
                start_receive(message, across, 1 - across.index, 0, "x").wait()
            pending.wait()
            if world.rank in (3, 1):
                start_send(message, across, 1 - across.index, 0).wait()
            barrier(inner.everyone)
            return total[-1].item()
    finally:
        world_module.machine = real


def test_who_waits_for_another_machine_keeps_nobody_of_its_own_waiting(eight: Pool, tmp_path: Path) -> None:
    assert eight.run(in_a_cycle, str(tmp_path / "store"), ranks=6) == [3] * 6


# ---- sums


def in_order(world: World, dtype: torch.dtype) -> bool:
    """Whether all ranks have the very same sum of numbers whose order matters, of a few and of many elements."""
    same = []
    for size in (50, 300_000, 4 * 3 * CHUNK // 4 + 5):
        mine = torch.randn(size, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
        start_all_reduce(mine, world.everyone, "x").wait()
        all_of_them = torch.empty(world.size * size, dtype=dtype)
        start_all_gather(all_of_them, mine, world.everyone, "x").wait()
        same.append(all(torch.equal(part, mine) for part in all_of_them.split(size)))
    return all(same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_same_sum_to_the_bit(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(in_order, dtype) == [True] * 4


def half(world: World) -> float:
    """One plus two halves of the spacing of bfloat16 above it: rounded once it is more than one."""
    value = {0: 1.0, 1: 2.0**-8, 2: 2.0**-8}[world.rank]
    tensor = torch.full((4,), value, dtype=torch.bfloat16)
    all_reduce(tensor, world.everyone, "x")
    return tensor[0].item()


def test_three_terms_in_half_precision_are_rounded_once(pool: Pool) -> None:
    assert pool.run(half, ranks=3) == [1 + 2.0**-7] * 3


def resized(world: World) -> int:
    """A tensor that has been sent can still be given another size."""
    tensor = torch.ones(1000)
    if world.rank == 0:
        start_send(tensor, world.everyone, 1, 3).wait()
    else:
        start_receive(tensor, world.everyone, 0, 3, "x").wait()
    tensor.untyped_storage().resize_(0)
    return tensor.untyped_storage().nbytes()


def test_what_was_sent_or_received_may_be_resized(pool: Pool) -> None:
    assert pool.run(resized, ranks=2) == [0, 0]
