"""Every family of models, without any other library: in pieces it computes what it computes as a whole."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, logits, model_of, shape_of

from shoal.model.context import Cache
from shoal.model.decoder import Decoder
from shoal.train.setup import materialise_alone


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_as_if_each_were_alone(family: str) -> None:
    model, lengths = model_of(family), [9, 1, 4]
    tokens = torch.randint(0, model.shape.vocab, (1, 14), generator=torch.Generator().manual_seed(2))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    restarting = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = logits(model, tokens, documents=documents, positions=restarting)
    alone = torch.cat([logits(model, one) for one in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [1, 3, 9])
def test_decoding_from_a_cache_gives_the_logits_of_one_forward_pass(family: str, prompt: int) -> None:
    model, cache = model_of(family), Cache()
    tokens = torch.randint(0, model.shape.vocab, (2, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        steps = [model.decode(step, cache) for step in (tokens[:, :prompt], *tokens[:, prompt:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(steps, dim=1), logits(model, tokens), rtol=1e-10, atol=1e-10)


def materialised(family: str, dtype: torch.dtype) -> Decoder:
    """As training starts."""
    with torch.device("meta"):
        model = Decoder(shape_of(family)).to(dtype)
    materialise_alone(model, seed=0)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_starts_with_norms_that_scale_by_one_and_biases_of_zero(family: str) -> None:
    model = materialised(family, torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            one = 0.0 if name.endswith("bias") or family == "gemma" else 1.0
            assert parameter.eq(one).all(), name
        else:
            ends = ("attn.out.weight", "ffn.down.weight", "experts.down.weight", "shared.down.weight")
            std, error = 0.02 / 6**0.5 if name.endswith(ends) else 0.02, 2 / parameter.numel() ** 0.5
            assert parameter.std().item() == pytest.approx(std, rel=max(0.1, error)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_in_bfloat16_as_in_float64_but_for_rounding(family: str) -> None:
    tokens = torch.randint(0, 61, (3, 14), generator=torch.Generator().manual_seed(2))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": torch.arange(13)[None]}
    exact, half = (materialised(family, dtype) for dtype in (torch.float64, torch.bfloat16))
    exact.load_state_dict(half.state_dict())
    losses = [model(batch, model.context(batch)) for model in (exact, half)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-4)
    for loss in losses:
        loss.backward()
    errors, norms = [], []
    for wanted, found in zip(exact.parameters(), half.parameters(), strict=True):
        assert wanted.grad is not None
        assert found.grad is not None
        assert found.grad.dtype == torch.bfloat16
        errors.append((found.grad - wanted.grad).norm())
        norms.append(wanted.grad.norm())
    assert torch.stack(errors).norm() < 0.01 * torch.stack(norms).norm()
