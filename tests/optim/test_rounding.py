from __future__ import annotations

import torch

from shoal.optim.rounding import Rounding


def rounded(wide: torch.Tensor, seed: int = 0, key: str = "run", updates: int = 1) -> torch.Tensor:
    rounding, half = Rounding(seed), torch.empty_like(wide, dtype=torch.bfloat16)
    rounding.updates = updates
    rounding.round_into(half, wide, key)
    return half.float()


def test_a_value_goes_to_one_of_its_neighbours_as_often_as_it_is_near() -> None:
    for value in (1 + 2**-9, -1 - 3 * 2**-10, 3e-5, -7e20):
        found = rounded(torch.full((200_000,), value))
        near = torch.tensor(value).bfloat16().float()
        neighbours = found.unique()
        assert len(neighbours) == 2
        assert near in neighbours
        assert abs(found.double().mean().item() / value - 1) < 1e-4


def test_what_bf16_has_stays() -> None:
    exact = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounded(exact), exact)
    edges = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    assert torch.equal(rounded(edges), edges)


def test_the_way_is_a_function_of_seed_update_and_run() -> None:
    wide = torch.randn(1000)
    once = rounded(wide)
    assert torch.equal(once, rounded(wide))
    for other in (rounded(wide, seed=1), rounded(wide, key="other"), rounded(wide, updates=2)):
        assert not torch.equal(once, other)
