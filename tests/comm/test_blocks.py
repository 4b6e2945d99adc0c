"""Rounding to blocks of int8, and what it is off by."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.blocks import BLOCK, pack, packed_bytes, unpack


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    packed = torch.full((packed_bytes(x.numel()),), 255, dtype=torch.uint8)
    pack(x, packed)
    out = torch.full_like(x, float("nan"))
    unpack(packed, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5, 1500 * BLOCK + 7])
def test_no_element_is_off_by_more_than_a_254th_of_the_largest_of_its_block(numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(numel)
    x = (torch.randn(numel, dtype=torch.float64) * torch.logspace(-3, 3, numel, dtype=torch.float64)).to(dtype)
    out = there_and_back(x)
    for block, found in zip(x.double().split(BLOCK), out.double().split(BLOCK), strict=True):
        if not block.numel():
            continue
        largest = block.abs().max()
        rounding = 2 * torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 1e-6
        assert ((block - found).abs() <= largest * (1 / 254 + rounding)).all()


def test_the_bound_is_reached() -> None:
    x = torch.zeros(BLOCK)
    x[:2] = torch.tensor([127.0, 0.4999])
    assert there_and_back(x)[:3].tolist() == [127.0, 0.0, 0.0]
    x[1] = 0.5001
    assert there_and_back(x)[1] == 1.0


def test_what_a_scale_divides_comes_back_as_it_was() -> None:
    """Also the largest of either sign, zeros, and in a block that is not whole."""
    torch.manual_seed(0)
    x = torch.randint(-127, 128, (2 * BLOCK + 9,)).float()
    for start in range(0, len(x), BLOCK):
        x[start] = -127.0
    x[BLOCK:] *= 2.0**-20
    assert torch.equal(there_and_back(x), x)
    assert torch.equal(there_and_back(torch.zeros(BLOCK)), torch.zeros(BLOCK))


@pytest.mark.parametrize("tiny", [1e-38, 1e-44])
def test_numbers_too_small_for_a_scale_stay_as_small(tiny: float) -> None:
    assert (there_and_back(torch.full((BLOCK,), tiny)) <= torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(bad: float, dtype: torch.dtype) -> None:
    """So that a step with such a gradient is known for one."""
    x = torch.ones(3 * BLOCK, dtype=dtype)
    x[BLOCK + 3] = bad
    first, second, third = there_and_back(x).split(BLOCK)
    assert second.isnan().all()
    assert torch.equal(first, torch.ones_like(first)) and torch.equal(third, first)  # noqa: PT018


def test_bytes_are_one_an_element_and_four_a_block() -> None:
    assert [packed_bytes(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, BLOCK + 4, BLOCK + 4, 2 * (BLOCK + 4)]
