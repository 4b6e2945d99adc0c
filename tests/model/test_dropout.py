from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoal.model.dropout import Noise

SAMPLES, LENGTH, FEATURES = 6, 40, 250
NUMBERS = torch.tensor([0, 1, 2, 900, 10**6, 2**40])


def mask(rate: float = 0.5, site: str = "blocks.0.attn", *, seed: int = 3, step: int = 11) -> Tensor:
    """What becomes of ones: zero where dropped."""
    return Noise.of(seed, step, NUMBERS, LENGTH).drop(torch.ones(SAMPLES, LENGTH, FEATURES), rate, site)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_kept_and_the_rest_scaled_to_the_same_mean(rate: float) -> None:
    dropped = mask(rate)
    deviation = (rate * (1 - rate) / dropped.numel()) ** 0.5
    assert abs(dropped.eq(0).double().mean().item() - rate) < 4 * deviation
    assert dropped[dropped != 0].unique().tolist() == pytest.approx([1 / (1 - rate)])
    for dim in (0, 1, 2):  # no sample, position or feature is dropped more than others
        along = dropped.eq(0).double().transpose(0, dim).flatten(1)
        assert (along.mean(1) - rate).abs().max() < 5 * (rate * (1 - rate) / along.shape[1]) ** 0.5


def test_neighbours_in_every_direction_are_dropped_independently() -> None:
    signs = mask().eq(0).double() * 2 - 1
    bound = 5 / (signs.numel() * 0.8) ** 0.5
    for dim in (0, 1, 2):
        first, second = signs.narrow(dim, 0, signs.shape[dim] - 1), signs.narrow(dim, 1, signs.shape[dim] - 1)
        assert abs((first * second).mean().item()) < bound


def test_another_step_seed_or_site_is_another_independent_mask() -> None:
    masks = [mask(), mask(step=12), mask(seed=4), mask(seed=11, step=3), mask(site="blocks.0.ffn"), mask(site="embed")]
    signs = [one.eq(0).double() * 2 - 1 for one in masks]
    assert torch.equal(mask(), masks[0])
    for i, one in enumerate(signs):
        for other in signs[:i]:
            assert abs((one * other).mean().item()) < 5 / one.numel() ** 0.5


def test_any_block_drops_what_it_would_drop_in_the_whole() -> None:
    """A rank may hold some samples, some positions or a block of features, in any order of samples."""
    full = mask(0.3)
    x = torch.ones(SAMPLES, LENGTH, FEATURES)
    noise = replace(Noise.of(3, 11, NUMBERS[[4, 1]], 15, first=20), block=3)
    assert torch.equal(noise.drop(x[:2, :15, :50], 0.3, "blocks.0.attn"), full[[4, 1], 20:35, 150:200])
    part = noise.part(4, 20)
    assert part.block == 3
    assert torch.equal(part.drop(x[:2, :20, :50], 0.3, "blocks.0.attn")[:, :11], full[[4, 1], 24:35, 150:200])


def test_keys_and_inputs_are_left_as_they_are() -> None:
    noise = Noise.of(3, 11, numbers := NUMBERS.clone(), LENGTH)
    rows, x = noise.rows.clone(), torch.ones(SAMPLES, LENGTH, 4)
    noise.drop(x, 0.5, "embed")
    assert torch.equal(noise.rows, rows)
    assert torch.equal(numbers, NUMBERS)
    assert x.eq(1).all()
    assert noise.drop(x, 0.0, "embed") is x


def test_the_backward_pass_drops_what_the_forward_pass_dropped() -> None:
    x = torch.randn(SAMPLES, LENGTH, FEATURES, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(FEATURES, dtype=torch.float64)
    dropped = Noise.of(3, 11, NUMBERS, LENGTH).drop(x, 0.25, "embed")
    (dropped * weights).sum().backward()
    torch.testing.assert_close(x.grad, (dropped / x).detach() * weights)
    assert dropped.dtype == torch.float64
