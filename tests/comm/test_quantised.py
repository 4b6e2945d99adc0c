"""Collectives of int8 blocks beside a plain calculation of what they round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.blocks import BLOCK, pack, packed_bytes, unpack
from shoal.comm.quantised import start_all_gather, start_all_reduce, start_reduce_scatter
from shoal.comm.world import World
from shoal.train.pool import Pool

PART = 2 * BLOCK + 3


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def rounded(x: Tensor) -> Tensor:
    packed, out = torch.empty(packed_bytes(x.numel()), dtype=torch.uint8), torch.empty_like(x)
    pack(x, packed)
    unpack(packed, out)
    return out


def gather(world: World, dtype: torch.dtype, inside: bool) -> tuple[bool, dict[str, float]]:
    part, size = values(world.rank, PART, dtype), world.size
    out = torch.full((size * PART,), float("nan"), dtype=dtype)
    own = out.tensor_split(size)[world.rank]
    if inside:
        own.copy_(part)
    pending = start_all_gather(out, own if inside else part, world.everyone, "parameters")
    pending.wait()
    pending.wait()
    expected = torch.cat([rounded(values(rank, PART, dtype)) for rank in range(size)])
    return torch.equal(out, expected), world.ledger.table()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "inside"), [(2, True), (3, False)])
def test_a_gather_gives_all_ranks_what_is_rounded_once_ones_own_too(
    ranks: int, inside: bool, dtype: torch.dtype, pool: Pool
) -> None:
    for equal, words in pool.run(gather, dtype, inside, ranks=ranks):
        assert equal
        assert words == {"world/parameters int8": (ranks - 1) * packed_bytes(PART)}


def reduce_scatter(world: World, dtype: torch.dtype, inside: bool) -> tuple[bool, dict[str, float]]:
    size = world.size
    terms = [values(rank, size * PART, dtype).tensor_split(size)[world.rank] for rank in range(size)]
    tensor = values(world.rank, size * PART, dtype)
    out = tensor.tensor_split(size)[world.rank] if inside else torch.full((PART,), float("nan"), dtype=dtype)
    start_reduce_scatter(out, tensor, world.everyone, "gradients").wait()
    wide = torch.promote_types(dtype, torch.float32)
    expected = terms.pop(world.rank).to(wide)
    for term in terms:
        packed, exact = torch.empty(packed_bytes(PART), dtype=torch.uint8), torch.empty(PART, dtype=wide)
        pack(term, packed)
        unpack(packed, exact)
        expected = expected + exact
    return torch.equal(out, expected.to(dtype)), world.ledger.table()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "inside"), [(2, True), (3, False)])
def test_a_sum_rounds_each_term_of_others_once_and_adds_up_in_float32(
    ranks: int, inside: bool, dtype: torch.dtype, pool: Pool
) -> None:
    for equal, words in pool.run(reduce_scatter, dtype, inside, ranks=ranks):
        assert equal
        assert words == {"world/gradients int8": (ranks - 1) * packed_bytes(PART)}


def all_reduce(world: World, numel: int) -> tuple[Any, float, dict[str, float]]:
    tensor = values(world.rank, numel)
    start_all_reduce(tensor, world.everyone, "gradients").wait()
    exact = sum(values(rank, numel).double() for rank in range(world.size))
    return tensor.numpy(), float((tensor - exact).abs().max()), world.ledger.table()


@pytest.mark.parametrize(("ranks", "numel"), [(2, 1), (2, 2 * PART), (3, 3 * PART + 1)])
def test_a_sum_that_all_ranks_need_is_the_same_on_all(ranks: int, numel: int, pool: Pool) -> None:
    first = None
    for found, off, words in pool.run(all_reduce, numel, ranks=ranks):
        first = found if first is None else first
        assert (found == first).all()
        assert off < ranks * 5 / 254 + ranks * 5 * ranks / 254  # each term, and the sum; no term is above 5
        each = -(-numel // ranks)
        assert words == {"world/gradients int8": 2 * (ranks - 1) * packed_bytes(each)}


def alone(world: World) -> bool:
    x, out = values(0, PART), torch.empty(PART)
    start_all_gather(out, x, world.everyone, "parameters").wait()
    same = torch.equal(out, x)
    start_reduce_scatter(out, x, world.everyone, "gradients").wait()
    start_all_reduce(out, world.everyone, "gradients").wait()
    return same and torch.equal(out, x) and world.ledger.words() == 0


def test_one_rank_rounds_nothing() -> None:
    assert alone(World())
