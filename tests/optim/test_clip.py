from __future__ import annotations

import pytest
import torch

from shoal.comm.collectives import barrier
from shoal.comm.world import World
from shoal.optim.clip import clip_factor, global_norm, squared_norm
from shoal.train.pool import Pool


@pytest.mark.parametrize("shift", [0.0, 0.5, 1000.0])
def test_the_norm_of_ten_million_float32_elements_is_exact_to_a_millionth(shift: float) -> None:
    x = torch.rand(10_000_001, generator=torch.Generator().manual_seed(0)) - 0.5 + shift
    exact = sum(chunk.double().square().sum().item() for chunk in x.split(1 << 20)) ** 0.5
    assert global_norm(squared_norm(x), World().everyone) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * 4096])
def test_every_element_is_counted_whatever_the_size(size: int) -> None:
    x = torch.arange(1, size + 1, dtype=torch.float64)
    found = squared_norm(x)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(size * (size + 1) * (2 * size + 1) / 6, rel=1e-12)
    assert squared_norm(torch.full((size,), 1e-30)).item() == pytest.approx(size * 1e-60, rel=1e-4)


def test_the_norm_of_low_precision_gradients_is_exact_too() -> None:
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert squared_norm(x).item() == pytest.approx(x.double().square().sum().item(), rel=1e-5)


def norm_of_mixed_copies(world: World) -> tuple[float, int]:
    """3 on all four ranks, 4 on each pair of ranks, and 12 that is rank 0's alone beside zeros elsewhere."""
    alone = torch.tensor([12.0 if world.rank == 0 else 0.0])
    parts = [(torch.tensor([3.0]), 4), (torch.tensor([4.0]), 2), (alone, 1)]
    squares = torch.stack([squared_norm(part) / copies for part, copies in parts]).sum()
    return global_norm(squares, world.everyone), world.ledger.calls(purpose="norm")


def norm_of_replicas(world: World) -> tuple[float, int]:
    barrier(world.everyone)
    squares = squared_norm(torch.tensor([3.0, 4.0])) + squared_norm(torch.tensor([12.0]))
    return global_norm(squares, world.group((world.rank,), "none")), world.ledger.calls()


def test_copies_are_counted_once(pool: Pool) -> None:
    assert pool.run(norm_of_mixed_copies) == [(pytest.approx((9 + 2 * 16 + 144) ** 0.5), 1)] * 4
    assert pool.run(norm_of_replicas, ranks=2) == [(13.0, 0)] * 2, "each knows the whole and asks nobody"


def test_gradients_are_scaled_down_to_the_limit_and_never_up() -> None:
    assert clip_factor(4.0, 1.0) == 0.25
    assert clip_factor(1.0, 1.0) == clip_factor(0.5, 1.0) == clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(1e9, 0) == 1.0
