from __future__ import annotations

import time

import pytest
import torch

from shoal.comm.collectives import Reduction, all_gather_bytes, all_reduce, barrier, broadcast, start_all_reduce
from shoal.comm.world import World
from shoal.train.pool import Pool


def reduce_pair(world: World, reduction: Reduction) -> list[float]:
    pair = (0, 2) if world.rank in (0, 2) else (1, 3)
    values = torch.tensor([1.0, -10.0, 100.0]) * (world.rank + 1)
    pending = start_all_reduce(values, world.group(pair, "dp"), "gradients", reduction)
    pending.wait()
    pending.wait()
    return [*values.tolist(), world.ledger.words("dp", "gradients")]


@pytest.mark.parametrize(
    ("reduction", "even", "odd"),
    [
        ("sum", [4, -40, 400], [6, -60, 600]),
        ("max", [3, -10, 300], [4, -20, 400]),
        ("min", [1, -30, 100], [2, -40, 200]),
    ],
)
def test_all_reduce_joins_the_ranks_of_its_group_alone(
    pool: Pool, reduction: Reduction, even: list[float], odd: list[float]
) -> None:
    words = 2 * 1 / 2 * 3
    assert pool.run(reduce_pair, reduction) == [[*even, words], [*odd, words]] * 2


def broadcast_in_halves(world: World) -> list[float]:
    values = torch.full((2,), float(world.rank))
    broadcast(values, world.group((0, 1) if world.rank < 2 else (2, 3), "tp"), "start")
    return [*values.tolist(), world.ledger.words("tp", "start")]


def test_broadcast_copies_from_the_lowest_rank_of_the_group(pool: Pool) -> None:
    assert pool.run(broadcast_in_halves) == [[0, 0, 1]] * 2 + [[2, 2, 1]] * 2


def gather(world: World) -> list[bytes]:
    return all_gather_bytes(bytes(range(256)) * world.rank, world.everyone, world.device)


@pytest.mark.parametrize("ranks", [1, 3])
def test_bytes_of_any_length_are_gathered_in_the_groups_order(pool: Pool, ranks: int) -> None:
    assert pool.run(gather, ranks=ranks) == [[bytes(range(256)) * rank for rank in range(ranks)]] * ranks


def gather_nothing(world: World) -> list[bytes]:
    return all_gather_bytes(b"", world.everyone, world.device)


def test_no_bytes_at_all_can_be_gathered(pool: Pool) -> None:
    assert pool.run(gather_nothing, ranks=2) == [[b"", b""]] * 2


def stagger(world: World) -> tuple[float, float]:
    time.sleep(0.1 * world.rank)
    before = time.monotonic()
    barrier(world.everyone)
    return before, time.monotonic()


def test_nobody_passes_a_barrier_before_all_have_come(pool: Pool) -> None:
    times = pool.run(stagger, ranks=3)
    assert max(before for before, _ in times) <= min(after for _, after in times)


def test_a_group_of_one_changes_nothing_and_moves_no_words() -> None:
    world = World()
    values = torch.tensor([1.0, 2.0])
    all_reduce(values, world.everyone, "gradients")
    broadcast(values, world.everyone, "start")
    barrier(world.everyone)
    assert values.tolist() == [1.0, 2.0]
    assert world.ledger.calls() == 0
