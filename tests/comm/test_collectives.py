from __future__ import annotations

import time

import pytest
import torch

from shoal.comm.backends import Reduction
from shoal.comm.collectives import (
    all_gather_bytes,
    all_reduce,
    barrier,
    broadcast,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_exchange,
    start_reduce,
    start_reduce_scatter,
)
from shoal.comm.world import World
from shoal.meter import Meter
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


def across_and_down(world: World, size: int, dtype: torch.dtype) -> list[list[float]]:
    """On a square of four ranks, all at once: every rank's numbers come to its row, and the sums of its column to each
    rank of that, first to the last one. Then what this rank got, and its words."""
    i, j = divmod(world.rank, 2)
    across, down = world.group((2 * i, 2 * i + 1), "col"), world.group((j, 2 + j), "row")
    mine = terms(4, size, dtype)[world.rank]
    came = [mine.clone() if place == j else torch.full_like(mine, -1.0) for place in range(2)]
    sums = [mine.clone() for _ in range(2)]
    pending = []
    for place in range(2):
        pending.append(start_broadcast(came[place], across, "it", place))
        pending.append(start_reduce(sums[1 - place], down, "it", 1 - place))
    for one in pending:
        one.wait()
        one.wait()
    return [*(x.tolist() for x in (*came, sums[i])), [world.ledger.words(axis, "it") for axis in ("col", "row")]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_broadcasts_and_reduces_of_several_groups_are_under_way_at_once(
    pool: Pool, size: int, dtype: torch.dtype
) -> None:
    whole = [x.tolist() for x in terms(4, size, dtype)]
    for rank, (first, second, total, words) in enumerate(pool.run(across_and_down, size, dtype)):
        i, j = divmod(rank, 2)
        assert [first, second] == whole[2 * i : 2 * i + 2]
        assert total == [a + b for a, b in zip(whole[j], whole[2 + j], strict=True)]
        assert words == [4 * size, 4 * size]


def reduce_to(world: World, root: int) -> list[list[float]]:
    """Two sums on the same rank, and two things started after them that are waited for first."""
    group, mine = world.everyone, float(world.rank + 1)
    sums = [torch.full((3,), mine * scale) for scale in (1, 10)]
    summing = [start_reduce(one, group, "it", root) for one in sums]
    came, parts = torch.full((3,), mine), torch.empty(world.size)
    start_broadcast(came, group, "other", (root + 1) % world.size).wait()
    start_all_gather(parts, torch.tensor([mine]), group, "other").wait()
    for one in summing:
        one.wait()
    return [*(x.tolist() for x in sums), came.tolist(), parts.tolist(), [world.ledger.words(purpose="it")]]


@pytest.mark.parametrize(("ranks", "root"), [(1, 0), (2, 1), (3, 0), (4, 2)])
def test_a_sum_comes_to_its_root_whatever_is_started_after_it(pool: Pool, ranks: int, root: int) -> None:
    total = float(sum(range(1, ranks + 1)))
    found = pool.run(reduce_to, root, ranks=ranks)
    assert found[root][:2] == [[total] * 3, [10 * total] * 3]
    for _, _, came, parts, words in found:
        assert came == [(root + 1) % ranks + 1.0] * 3
        assert parts == [rank + 1.0 for rank in range(ranks)]
        assert words == [2 * 3 * (ranks - 1) / ranks]


def reduce_again(world: World) -> tuple[bool, float]:
    """Whether sums of numbers whose order matters come out the same each time, and the most memory one took beside
    what it was given, in tensors of its size."""
    mine = torch.randn(1000, generator=torch.Generator().manual_seed(world.rank))
    outs = [mine.clone() for _ in range(5)]
    with Meter() as meter:
        meter.label("given", outs)
        given = meter.live()
        for out in outs:
            start_reduce(out, world.everyone, "it", 0).wait()
    return all(torch.equal(out, outs[0]) for out in outs), (meter.peak() - given) / mine.nbytes


def test_a_reduce_adds_in_one_order_and_holds_a_few_terms_at_most(pool: Pool) -> None:
    """In shared memory the terms are where their ranks have put them."""
    (same, most), *others = pool.run(reduce_again)
    assert (same, most <= 3) == (True, True)
    assert others == [(True, 0)] * 3


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
    start_reduce(values, world.everyone, "gradients", 0).wait()
    barrier(world.everyone)
    assert values.tolist() == [1.0, 2.0]
    assert world.ledger.calls() == 0
