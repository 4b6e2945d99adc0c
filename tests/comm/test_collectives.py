from __future__ import annotations

import time

import pytest
import torch

from shoal.comm.collectives import (
    Reduction,
    all_gather_bytes,
    all_reduce,
    barrier,
    broadcast,
    start_all_gather,
    start_all_reduce,
    start_exchange,
    start_reduce_scatter,
)
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


def terms(ranks: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Whole numbers, so that sums are exact whatever their order."""
    return [(torch.arange(ranks * size) * (rank + 1) % 7).to(dtype) for rank in range(ranks)]


def scatter_and_gather(world: World, size: int, dtype: torch.dtype, in_place: bool) -> list[list[float]]:
    """This rank's part of the sum, and what gathering the parts gives; then the same again, both times at once."""
    group, tensor = world.everyone, terms(world.size, size, dtype)[world.rank]
    own = slice(world.rank * size, (world.rank + 1) * size)
    out = tensor[own] if in_place else torch.full((size,), -1.0).to(dtype)
    other, gathered = tensor.clone(), torch.full_like(tensor, -1.0)
    first = start_reduce_scatter(out, tensor, group, "gradients")
    second = start_reduce_scatter(other[own], other, group, "gradients")
    first.wait()
    second.wait()
    part = out.clone()
    full = tensor if in_place else torch.full_like(tensor, -1.0)
    pending = [start_all_gather(full, out, group, "parameters"), start_all_gather(gathered, other[own], group, "x")]
    for one in pending:
        one.wait()
        one.wait()
    moved = [world.ledger.words(purpose=purpose) for purpose in ("gradients", "parameters")]
    return [part.tolist(), full.tolist(), gathered.tolist(), moved]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "size"), [(1, 3), (2, 5), (3, 1), (4, 6), (4, 0)])
def test_a_sum_is_scattered_in_parts_that_gather_to_the_whole(
    pool: Pool, ranks: int, size: int, dtype: torch.dtype, in_place: bool
) -> None:
    whole = torch.stack(terms(ranks, size, dtype)).sum(0)
    words = (ranks - 1) * size
    found = pool.run(scatter_and_gather, size, dtype, in_place, ranks=ranks)
    for (part, full, gathered, moved), expected in zip(found, whole.tensor_split(ranks), strict=True):
        assert part == expected.tolist()
        assert full == gathered == whole.tolist()
        assert moved == [2 * words, words]


def repeat_sums(world: World) -> bool:
    """Whether sums of numbers whose order matters come out the same each time."""
    tensor = torch.randn(4 * 1000, generator=torch.Generator().manual_seed(world.rank))
    outs = [torch.empty(1000) for _ in range(5)]
    for out in outs:
        start_reduce_scatter(out, tensor, world.everyone, "gradients").wait()
    return all(torch.equal(out, outs[0]) for out in outs)


def test_a_scattered_sum_is_the_same_every_time(pool: Pool) -> None:
    assert pool.run(repeat_sums) == [True] * 4


def pair_off(world: World) -> list[float]:
    """Gathers in a group of the outer ranks and one of the inner ones, whose ranks are not their places."""
    pair = (0, 3) if world.rank in (0, 3) else (1, 2)
    out = torch.zeros(2)
    start_all_gather(out, torch.tensor([float(world.rank)]), world.group(pair, "dp"), "parameters").wait()
    return out.tolist()


def test_parts_are_in_the_order_of_their_group(pool: Pool) -> None:
    assert pool.run(pair_off) == [[0, 3], [1, 2], [1, 2], [0, 3]]


def pass_round(world: World) -> list[list[float]]:
    """Each rank sends rank r r elements, all its own number, but nothing to the next one round."""
    group, me, size = world.everyone, world.rank, world.size

    def amount(source: int, to: int) -> int:
        return 0 if to in (source, (source + 1) % size) else to

    given, taken = [amount(me, to) for to in range(size)], [amount(source, me) for source in range(size)]
    into = torch.full((sum(taken),), -1.0)
    start_exchange(into, taken, torch.full((sum(given),), float(me)), given, group, "turn").wait()
    return [into.tolist(), [world.ledger.words(purpose="turn")]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_exchange_what_they_agree_on_and_count_what_they_receive(pool: Pool, ranks: int) -> None:
    for me, (received, words) in enumerate(pool.run(pass_round, ranks=ranks)):
        sources = [source for source in range(ranks) if me not in (source, (source + 1) % ranks)]
        assert received == [float(source) for source in sources for _ in range(me)]
        assert words == [len(received)]


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
