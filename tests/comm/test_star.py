"""What goes to one rank and comes from one, and where its words are counted."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.backends import Reduction
from shoal.comm.star import start_pull, start_push
from shoal.comm.world import World
from shoal.train.pool import Pool

WORDS = 70_001  # several chunks, the last of them not whole


def pushed(world: World, reduction: Reduction, to: int) -> tuple[bool, float]:
    """Several at once, to one rank and the next; whether the values are right where they go, and words received."""
    group, terms = world.everyone, [float((7 * rank + 3) % 5) for rank in range(world.size)]
    roots = [(to + number) % world.size for number in range(3)]
    tensors = [torch.full((WORDS + number,), terms[world.rank]) for number in range(3)]
    under_way = [start_push(one, group, "gradients", root, reduction) for one, root in zip(tensors, roots, strict=True)]
    for pending in under_way:
        pending.wait()
    joined = {"sum": sum(terms), "max": max(terms), "min": min(terms)}[reduction]
    mine = [one for one, root in zip(tensors, roots, strict=True) if root == world.rank]
    return all(bool((one == joined).all()) for one in mine), world.ledger.words("world", "gradients")


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
@pytest.mark.parametrize(("ranks", "to"), [(2, 1), (4, 1)])
def test_terms_are_joined_where_they_go_and_counted_there(
    pool: Pool, reduction: Reduction, ranks: int, to: int
) -> None:
    expected = [0] * ranks
    for number in range(3):
        expected[(to + number) % ranks] += (ranks - 1) * (WORDS + number)
    assert pool.run(pushed, reduction, to, ranks=ranks) == [(True, words) for words in expected]


def pulled(world: World) -> tuple[list[float], float]:
    """From each rank, all under way at once; and words received."""
    tensors = [torch.full((WORDS,), float(world.rank)) for _ in range(world.size)]
    under_way = [start_pull(one, world.everyone, "parameters", source) for source, one in enumerate(tensors)]
    for pending in under_way:
        pending.wait()
    return [float(one.unique().item()) for one in tensors], world.ledger.words("world", "parameters")


def test_what_one_rank_has_comes_to_the_others_and_is_counted_there(pool: Pool) -> None:
    assert pool.run(pulled, ranks=3) == [([0.0, 1.0, 2.0], 2 * WORDS)] * 3


def alone(world: World) -> float:
    tensor = torch.ones(3)
    start_push(tensor, world.everyone, "gradients", 0).wait()
    start_pull(tensor, world.everyone, "parameters", 0).wait()
    return float(tensor.sum()) + world.ledger.words()


def test_one_rank_has_what_it_has(pool: Pool) -> None:
    assert pool.run(alone, ranks=1) == [3.0]
