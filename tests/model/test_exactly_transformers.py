"""Experts and latents beside transformers, made to compute in float64 all the way: nothing is left but rounding.

Its norms, gates and rotary angles are in float32 by name, whatever the model is in. While it is built and run here,
that name means float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import TINY, VOCAB, save_tiny
from torch import Tensor

import shoal
from shoal.model.context import Cache
from shoal.model.decoder import Decoder

transformers = pytest.importorskip("transformers")

NAMES = [name for name, tiny in TINY.items() if {"num_experts_per_tok", "kv_lora_rank"} & set(tiny.options)]


def exactly(model: Any, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What a model of transformers computes, all in float64."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    with monkeypatch.context() as patched:
        patched.setattr(torch, "float32", torch.float64)
        patched.setattr(torch, "float", torch.float64)
        patched.setattr(Tensor, "float", Tensor.double)
        twin = transformers.AutoModelForCausalLM.from_config(model.config).double().eval()
        twin.set_experts_implementation("eager")  # grouped products have no float64
        twin.load_state_dict(weights)
        with torch.no_grad():
            logits: Tensor = twin(tokens).logits
    return logits


def decoded(model: Decoder, tokens: Tensor) -> Tensor:
    """The logits of a prompt and of the positions after it, one at a time."""
    cache = Cache()
    steps = [tokens[:, :7], *tokens[:, 7:].split(1, dim=1)]
    return torch.cat([model.decode(step, cache) for step in steps], dim=1)


@pytest.mark.parity
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_but_for_rounding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = save_tiny(name, tmp_path)
    tokens = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(5))
    expected = exactly(theirs, tokens, monkeypatch)
    assert expected.dtype == torch.float64
    assert expected.std() > 0.3, "a model that says something"
    model: Any = shoal.load_hf(tmp_path, "dp=1,dtype=float64").task.module
    batch = {"tokens": tokens, "positions": torch.arange(24)[None]}
    with torch.no_grad():
        torch.testing.assert_close(model(batch, model.context(batch)), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(decoded(model, tokens), expected, rtol=0, atol=1e-12)
