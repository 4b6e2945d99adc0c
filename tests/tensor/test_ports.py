from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensor_ranks import Array, assert_same
from torch import Tensor

from shoal.comm.differentiable import pad, part_size
from shoal.comm.world import Group, World
from shoal.layout.kinds import split_evenly
from shoal.tensor.ports import (
    PURPOSE,
    Even,
    Extent,
    Port,
    Positions,
    Repeated,
    Shares,
    Still,
    by_part,
    entered,
    even,
    left,
    shares,
)
from shoal.train.pool import Pool

GARBAGE = 9.0  # what padding holds on the way in


@dataclass(frozen=True)
class Case:
    """A port, the ranks it is one of, and a whole whose dim ``dim`` has ``length`` elements."""

    kind: str
    ranks: int
    length: int
    dim: int = 0

    def numbers(self, seed: int) -> Tensor:
        shape = [2, 3, 5]
        shape[self.dim] = self.length
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def port(self, group: Group) -> Port:
        made: dict[str, Any] = {
            "repeated": lambda: Repeated(group),
            "even": lambda: Even(group, self.dim),
            "positions": lambda: Positions(group, extent=Extent(self.length)),
            "shares": lambda: Shares(group, self.dim, split_evenly(self.length, group.size)),
        }
        return made[self.kind]()  # type: ignore[no-any-return]

    def part(self, whole: Tensor, rank: int, padding: float) -> Tensor:
        """What rank ``rank`` has of ``whole``."""
        if self.kind == "repeated":
            return whole.clone()
        sizes = split_evenly(self.length, self.ranks)
        if self.kind == "positions":
            sizes = (part_size(self.length, self.ranks),) * self.ranks
            whole = pad(whole, self.dim, sum(sizes), padding)
        return whole.split(sizes, self.dim)[rank].clone()

    @property
    def goes_on_alike(self) -> bool:
        """Whether all ranks have the same of what has left, which then counts once."""
        return self.kind == "repeated"


CASES = [
    *(Case("repeated", ranks, 2) for ranks in (2, 4)),
    *(Case("even", ranks, 12, dim) for ranks in (2, 3, 4) for dim in (0, 1, -1)),
    *(Case("positions", ranks, length, 1) for ranks in (2, 3, 4) for length in (1, 6, 7, 8)),
    *(Case("shares", ranks, length, dim) for ranks in (2, 3, 4) for length in (7, 11) for dim in (0, 1, -1)),
    *(Case("shares", 4, length, dim) for length in (1, 2) for dim in (0, 1, -1)),  # some ranks have none
]


# ---- there and back ----------------------------------------------------------------------------------------


def enter(world: World, case: Case) -> tuple[Array, Array, float]:
    """The whole, the gradient of this rank's part, and the words moved before the backward pass."""
    part = case.part(case.numbers(0), world.rank, GARBAGE).requires_grad_()
    whole = entered(part, case.port(world.everyone))
    words = world.ledger.words("world", PURPOSE)
    (whole * case.numbers(1 + world.rank)).sum().backward()
    assert part.grad is not None
    return whole.detach().numpy(), part.grad.numpy(), words


def leave(world: World, case: Case) -> tuple[Array, Array, float]:
    """This rank's part, the gradient of its term, and the words moved before the backward pass."""
    term = case.numbers(1 + world.rank).requires_grad_()
    part = left(term * 1.0, case.port(world.everyone))
    words = world.ledger.words("world", PURPOSE)
    (part * case.part(case.numbers(0), world.rank, GARBAGE)).sum().backward()
    assert term.grad is not None
    return part.detach().numpy(), term.grad.numpy(), words


def total(case: Case) -> Tensor:
    return torch.stack([case.numbers(1 + rank) for rank in range(case.ranks)]).sum(0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_whole_enters_and_its_gradients_are_summed_and_divided(pool: Pool, case: Case) -> None:
    for rank, (whole, gradient, _) in enumerate(pool.run(enter, case, ranks=case.ranks)):
        assert (whole == case.numbers(0).numpy()).all()
        assert_same(gradient, case.part(total(case), rank, 0.0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_terms_leave_summed_and_divided_and_the_whole_gradient_comes_back(pool: Pool, case: Case) -> None:
    for rank, (part, gradient, _) in enumerate(pool.run(leave, case, ranks=case.ranks)):
        assert_same(part, case.part(total(case), rank, 0.0))
        assert (gradient == case.numbers(0).numpy()).all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_words_moved_are_those_of_the_whole_with_its_padding(pool: Pool, ranks: int) -> None:
    for kind, length, padded in (("even", 12, 12), ("positions", 7, part_size(7, ranks) * ranks)):
        case = Case(kind, ranks, length, 1)
        formula = pytest.approx((ranks - 1) / ranks * 2 * padded * 5)
        assert [words for _, _, words in pool.run(enter, case, ranks=ranks)] == [formula] * ranks
        assert [words for _, _, words in pool.run(leave, case, ranks=ranks)] == [formula] * ranks
    case = Case("repeated", ranks, 2)
    assert [words for _, _, words in pool.run(enter, case, ranks=ranks)] == [0] * ranks
    formula = pytest.approx(2 * (ranks - 1) / ranks * 2 * 3 * 5)
    assert [words for _, _, words in pool.run(leave, case, ranks=ranks)] == [formula] * ranks


def in_place(world: World) -> bool:
    term = torch.ones(3, requires_grad=True) * 1.0
    return left(term, Repeated(world.everyone)) is term and term.tolist() == [2.0] * 3


def test_a_sum_that_is_not_divided_takes_the_place_of_its_term(pool: Pool) -> None:
    assert pool.run(in_place, ranks=2) == [True] * 2


def with_strides(world: World) -> list[bool]:
    """Whether gradients that are no block of memory come back as others do: one number for all, and a transpose."""
    port, found = Even(world.everyone, -1), []
    for gradient in (torch.ones(1).expand(2, 3, 4), torch.arange(24.0).view(4, 3, 2).transpose(0, 2)):
        x = torch.ones(2, 3, 4, requires_grad=True)
        left(entered(x, port) * 1.0, port).backward(gradient)
        found.append(x.grad is not None and torch.equal(x.grad, world.size * gradient))
    return found


def test_gradients_may_be_views(pool: Pool) -> None:
    assert pool.run(with_strides, ranks=2) == [[True, True]] * 2


# ---- ports that move nothing, and which port is chosen -----------------------------------------------------


def test_nothing_moves_where_one_rank_has_all() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    port = Still()
    assert port.start_enter(x, port.full(x)).wait() is x
    assert port.start_leave(x).wait() is x
    left(entered(x, port) * 2.0, port).sum().backward()
    assert x.grad is not None
    assert (x.grad == 2.0).all()


def choose(world: World) -> list[str]:
    group = world.everyone
    made = even(group, 1), shares(group, -1, 6), shares(group, -1, 7)
    return [type(port).__name__ + str(getattr(port, "sizes", "")) for port in made]


def test_parts_are_even_where_they_can_be(pool: Pool) -> None:
    assert pool.run(choose, ranks=1) == [["Still", "Still", "Still"]]
    assert pool.run(choose, ranks=3) == [["Even", "Even", "Shares(3, 2, 2)"]] * 3


def test_positions_of_another_micro_batch_are_not_taken_for_these(pool: Pool) -> None:
    assert pool.run(positions_of_another, ranks=2) == ["3 of 7 positions"] * 2


def positions_of_another(world: World) -> str:
    with pytest.raises(AssertionError) as raised:
        Positions(world.everyone, extent=Extent(7)).full(torch.empty(2, 3, 5))
    return str(raised.value)


def test_labels_lie_as_the_parts_of_the_positions_do() -> None:
    labels = torch.arange(10).view(2, 5)
    assert by_part(labels, 1, -1).tolist() == [list(range(10))]
    assert by_part(labels, 3, -1).tolist() == [[0, 1, 5, 6], [2, 3, 7, 8], [4, -1, 9, -1]]
