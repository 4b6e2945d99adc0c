from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.comm.differentiable import (
    here,
    joined,
    pad,
    part_size,
    start_divided_sum,
    start_gather,
    start_join,
    start_shared_sum,
    start_sum,
)
from shoal.comm.world import World
from shoal.train.pool import Pool

Array = np.ndarray[Any, Any]


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(whole: Tensor, dim: int, size: int, rank: int) -> Tensor:
    """Part number ``rank`` of ``size`` elements along ``dim``, with zeros after the end."""
    ends = [0] * (2 * whole.ndim)
    ends[2 * (whole.ndim - 1 - dim % whole.ndim) + 1] = size * (rank + 1)
    return torch.nn.functional.pad(whole, ends).narrow(dim, size * rank, size).contiguous()


# ---- moves -------------------------------------------------------------------------------------------------


def move(world: World, shape: tuple[int, ...], dim: int) -> list[Array]:
    """A sum, a divided sum, and the gathered parts of it, all under way at once on a group that skips a rank."""
    group = world.group((0, 2, 3), "tp") if world.rank != 1 else world.group((1,), "tp")
    x = numbers(shape, world.rank)
    waiting = (
        start_sum(x.clone(), group, "it"),
        start_divided_sum(x.transpose(0, 1).contiguous().transpose(0, 1), dim, group, "it"),
    )
    length = shape[dim]
    whole = numbers(shape, 9)
    part = cut(whole, dim, part_size(length, group.size), group.index)
    gathered = start_gather(part, dim, length, group, "it").wait()
    return [*(one.wait().numpy() for one in waiting), gathered.numpy(), np.array(world.ledger.words("tp", "it"))]


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("shape", [(3, 6, 9), (2, 7, 1), (1, 1, 4)], ids=str)
def test_sums_and_gathers_along_any_dim_of_any_length(pool: Pool, shape: tuple[int, ...], dim: int) -> None:
    ranks = pool.run(move, shape, dim)
    expected = sum((numbers(shape, rank) for rank in (0, 2, 3)), torch.zeros(()))
    size = part_size(shape[dim], 3)
    padded = np.prod(shape) / shape[dim] * size * 3
    for place, rank in enumerate((0, 2, 3)):
        whole, part, gathered, words = ranks[rank]
        np.testing.assert_allclose(whole, expected, rtol=1e-14, atol=1e-14)
        np.testing.assert_allclose(part, cut(expected, dim, size, place), rtol=1e-14, atol=1e-14)
        assert (gathered == numbers(shape, 9).numpy()).all()
        brought = padded if shape[dim] > 1 else np.prod(shape)  # of one rank's part that is all there is no padding
        assert words == pytest.approx(2 / 3 * (2 * np.prod(shape) + padded + brought))
    alone, part, gathered, words = ranks[1]
    assert (alone == numbers(shape, 1).numpy()).all()
    assert (part == alone).all()
    assert (gathered == numbers(shape, 9).numpy()).all()
    assert words == 0


def move_shares(world: World, sizes: tuple[int, ...], dim: int) -> tuple[Array, Array]:
    """Parts of ``sizes`` put together, and a sum divided into such parts, both under way at once."""
    group = world.everyone
    whole, term = numbers(with_length(sum(sizes), dim), 9), numbers(with_length(sum(sizes), dim), world.rank)
    joining = start_join(whole.split(sizes, dim)[world.rank], dim, sizes, group, "it")
    shared = start_shared_sum(term, dim, sizes, group, "it").wait()
    return joining.wait().numpy(), shared.numpy()


def with_length(length: int, dim: int) -> tuple[int, ...]:
    shape = [2, 3, 4]
    shape[dim] = length
    return tuple(shape)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("sizes", [(3, 1), (2, 1, 2), (0, 4, 1, 0), (1, 1, 0), (2, 2, 2, 2)], ids=str)
def test_shares_of_any_sizes_are_joined_and_summed(pool: Pool, sizes: tuple[int, ...], dim: int) -> None:
    ranks = range(len(sizes))
    total = torch.stack([numbers(with_length(sum(sizes), dim), rank) for rank in ranks]).sum(0)
    found = pool.run(move_shares, sizes, dim, ranks=len(sizes))
    for (joined_parts, shared), expected in zip(found, total.split(sizes, dim), strict=True):
        assert (joined_parts == numbers(with_length(sum(sizes), dim), 9).numpy()).all()
        np.testing.assert_allclose(shared, expected, rtol=1e-14, atol=1e-14)


def test_what_is_here_already_need_not_be_waited_for() -> None:
    x = torch.ones(2)
    assert here(x).wait() is x


def test_padding_goes_to_the_end_of_its_dim_and_copies_nothing_where_there_is_none() -> None:
    x = torch.tensor([[1, 2], [3, 4]])
    assert pad(x, 0, 3, -1.0).tolist() == [[1, 2], [3, 4], [-1, -1]]
    assert pad(x, -1, 4).tolist() == [[1, 2, 0, 0], [3, 4, 0, 0]]
    assert pad(x, 1, 2) is x
    assert [part_size(length, 4) for length in (1, 4, 5, 8)] == [1, 1, 2, 2]


# ---- gradients: against the same function of all ranks' inputs, in one process -----------------------------

SIZES = (3, 1, 2)


def join(world: World) -> tuple[Array, Array]:
    """The result, and the gradient of this rank's part of it."""
    x = numbers((2, SIZES[world.rank], 4), world.rank).requires_grad_()
    result = joined(x * 1.0, 1, SIZES, world.everyone, "it")
    (result * numbers(tuple(result.shape), 10)).sum().backward()
    assert x.grad is not None
    return result.detach().numpy(), x.grad.numpy()


def test_what_is_joined_counts_once_though_all_ranks_have_it(pool: Pool) -> None:
    parts = [numbers((2, size, 4), rank).requires_grad_() for rank, size in enumerate(SIZES)]
    whole = torch.cat(parts, 1)
    (whole * numbers(tuple(whole.shape), 10)).sum().backward()
    for (result, gradient), part in zip(pool.run(join, ranks=len(SIZES)), parts, strict=True):
        assert (result == whole.detach().numpy()).all()
        np.testing.assert_allclose(gradient, part.grad, rtol=1e-14, atol=1e-14)
