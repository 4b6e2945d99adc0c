"""Tensors without memory: what stands in for what, and what stays real."""

from __future__ import annotations

import resource

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.meter import Meter
from shoal.storage import stands_in
from shoal.train.stand_ins import MOST_REAL, StandIns


def test_what_is_made_of_floating_point_numbers_stands_in_and_few_whole_numbers_are_real() -> None:
    batch = torch.arange(6).view(2, 3)
    with StandIns():
        assert stands_in(torch.zeros(3))
        assert stands_in(torch.tensor(0.5))
        assert torch.arange(4).tolist() == [0, 1, 2, 3]
        assert stands_in(torch.zeros(MOST_REAL + 1, dtype=torch.int64))
        assert (batch != 5).sum().to(torch.float64).item() == 5.0  # what is made of a real batch alone
        assert batch[batch > 2].tolist() == [3, 4, 5]
        assert stands_in(batch * torch.zeros(3))


def test_what_nobody_knows_is_zero() -> None:
    with StandIns():
        unknown = torch.randn(3)
        assert (unknown.sum().item(), unknown.argmax().item(), bool(unknown[0] > 1)) == (0.0, 0, False)


def test_a_model_on_the_meta_device_stays_as_it_is() -> None:
    with StandIns():
        with torch.device("meta"):
            layer = nn.Linear(3, 4).to(torch.bfloat16)
        assert layer.weight.is_meta


def test_terabytes_take_no_memory_and_fail_as_real_ones_would() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with StandIns():
        x, weight = torch.zeros(1 << 20, 1 << 18), nn.Parameter(torch.zeros(1 << 18, 1 << 18))
        F.linear(x, weight).sum().backward()
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
        with pytest.raises(RuntimeError, match="5, 5"):
            x @ torch.zeros(5, 5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_meter_counts_them_as_it_counts_real_ones(dtype: torch.dtype) -> None:
    def step() -> list[int]:
        with Meter() as meter:
            first, norm, last = (
                nn.Linear(24, 40, dtype=dtype),
                nn.LayerNorm(40, dtype=dtype),
                nn.Linear(40, 24, dtype=dtype),
            )
            x = torch.ones(2, 4, 7, 6, dtype=dtype)
            with meter.phase("forward"):
                h = last(norm(F.silu(first(x.flatten(2).view(2, 7, 24)))))
                q = h.view(2, 7, 4, 6).transpose(1, 2)
                y = F.scaled_dot_product_attention(q, x, x, is_causal=True)
            with meter.phase("backward"):
                y.sum().backward()
        return [meter.peak("forward"), meter.peak("backward"), meter.live()]

    real = step()
    with StandIns():
        assert step() == real
