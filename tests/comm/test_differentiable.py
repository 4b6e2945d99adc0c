from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.comm.differentiable import (
    divided_total,
    here,
    joined,
    pad,
    part_size,
    start_divided_sum,
    start_gather,
    start_sum,
    total,
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
        assert words == pytest.approx(2 / 3 * (2 * np.prod(shape) + 2 * padded))
    alone, part, gathered, words = ranks[1]
    assert (alone == numbers(shape, 1).numpy()).all()
    assert (part == alone).all()
    assert (gathered == numbers(shape, 9).numpy()).all()
    assert words == 0


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

RANKS, SHAPE, SIZES = 3, (2, 5, 4), (3, 1, 2)


def inputs(kind: str) -> list[Tensor]:
    shapes = [(2, size, 4) for size in SIZES] if kind == "joined" else [SHAPE] * RANKS
    return [numbers(shape, rank) for rank, shape in enumerate(shapes)]


def plain(kind: str, terms: list[Tensor]) -> list[Tensor]:
    """What each rank has afterwards."""
    if kind == "joined":
        return [torch.cat(terms, 1)] * RANKS
    whole = torch.stack(terms).sum(0)
    if kind == "total":
        return [whole] * RANKS
    return [cut(whole, 1, part_size(SHAPE[1], RANKS), rank) for rank in range(RANKS)]


def differentiate(world: World, kind: str) -> tuple[Array, Array]:
    """The result, and the gradient of this rank's input when it is passed on as each rank would pass it on."""
    x = inputs(kind)[world.rank].requires_grad_()
    group, term = world.everyone, x * 1.0
    if kind == "total":
        result = total(term, group, "it")
    elif kind == "joined":
        result = joined(term, 1, SIZES, group, "it")
    else:
        result = divided_total(term, -2, group, "it")
    (result * numbers(tuple(result.shape), 10 + (world.rank if kind == "divided" else 0))).sum().backward()
    assert x.grad is not None
    return result.detach().numpy(), x.grad.numpy()


@pytest.mark.parametrize("kind", ["total", "divided", "joined"])
def test_gradients_equal_those_of_one_process(pool: Pool, kind: str) -> None:
    """A result that all ranks have alike counts once; parts of one result count each."""
    terms = [term.requires_grad_() for term in inputs(kind)]
    results = plain(kind, terms)
    weighed = [(result * numbers(tuple(result.shape), 10 + rank)).sum() for rank, result in enumerate(results)]
    (sum(weighed) if kind == "divided" else weighed[0]).backward()  # type: ignore[union-attr]
    for found, expected, term in zip(pool.run(differentiate, kind, ranks=RANKS), results, terms, strict=True):
        np.testing.assert_allclose(found[0], expected.detach(), rtol=1e-14, atol=1e-14)
        np.testing.assert_allclose(found[1], term.grad, rtol=1e-14, atol=1e-14)


def in_place(world: World) -> bool:
    term = torch.ones(3, requires_grad=True) * 1.0
    return total(term, world.everyone, "it") is term and term.tolist() == [2.0] * 3


def test_a_total_takes_the_place_of_its_term(pool: Pool) -> None:
    assert pool.run(in_place, ranks=2) == [True] * 2
