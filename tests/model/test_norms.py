from __future__ import annotations

import torch

from shoal.model.norms import RMSNormPlusOne


def test_a_weight_of_zero_scales_by_one_and_every_other_by_one_more_than_itself() -> None:
    norm, x = RMSNormPlusOne(6, eps=0.1).double(), torch.randn(3, 6, dtype=torch.float64)
    normalised = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(norm(x), normalised)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-2, 2, 6))
    torch.testing.assert_close(norm(x), normalised * (1 + torch.linspace(-2, 2, 6, dtype=torch.float64)))


def test_in_half_precision_a_small_weight_is_not_lost_beside_one() -> None:
    """1 + 2⁻¹⁰ is 1 in bfloat16, whose numbers near one are 2⁻⁷ apart; a result that lies close to the middle between
    two of them shows which it was."""
    norm = RMSNormPlusOne(1024, eps=0.0).bfloat16()
    x = torch.linspace(0.5, 1.5, 1024).bfloat16()
    plain = norm(x)
    with torch.no_grad():
        norm.weight.fill_(2.0**-10)
    assert plain.dtype == torch.bfloat16
    assert (norm(x) > plain).any()
