from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config import Model
from shoal.memory.recompute import Recomputed, recompute_attention, recomputed
from shoal.meter import ACTIVATIONS, Meter
from shoal.model.context import Cache
from shoal.model.decoder import Decoder

SHAPE = Model(layers=3, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=11, dropout=0.3)
SAMPLES, LENGTH = 2, 32


def decoder() -> Decoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder(SHAPE).double()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SHAPE.vocab, (SAMPLES, LENGTH + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "positions": torch.arange(LENGTH).expand(SAMPLES, LENGTH),
        "sample": torch.arange(SAMPLES),
        "documents": torch.arange(LENGTH).expand(SAMPLES, LENGTH) // 7,  # so that attention has a mask
    }


def train(model: Decoder, runs: Sequence[Callable[..., Tensor]]) -> tuple[Tensor, list[Tensor], int]:
    """Loss, gradients, and the bytes of activations between the passes."""
    inputs = batch()
    ctx = model.context(inputs, seed=3, step=4, train=True)
    with Meter() as meter:
        meter.label("params", model.parameters())
        with meter.phase("forward"):
            x = inputs["tokens"]
            for run in runs:
                x = run(x, ctx)
            x = model.loss(x, ctx)
        kept = meter.live(ACTIVATIONS)
        gradients = torch.autograd.grad(x, list(model.parameters()))
    return x.detach(), list(gradients), kept


def full(model: Decoder) -> list[Callable[..., Tensor]]:
    *inner, last = [layer for _, layer in model.layers()]
    return [*(recomputed(partial(model.apply_layer, layer)) for layer in inner), last]


def selective(model: Decoder) -> list[Callable[..., Tensor]]:
    for name, layer in model.layers():
        recompute_attention(name, layer, model.roles)
    return [layer for _, layer in model.layers()]


def plain(model: Decoder) -> list[Callable[..., Tensor]]:
    return [layer for _, layer in model.layers()]


def test_gradients_stay_the_same_to_the_last_bit_and_less_is_kept() -> None:
    """With dropout, whose masks are made again. Full keeps of each block its input and no more; selective keeps all but
    what is inside the core of attention."""
    results: dict[str, Any] = {}
    for how in (plain, full, selective):
        model = decoder()
        names = [name for name, _ in model.named_parameters()]
        results[how.__name__] = train(model, how(model))
        assert [name for name, _ in model.named_parameters()] == names
    loss, gradients, kept = results.pop("plain")
    for other_loss, others, _ in results.values():
        assert torch.equal(other_loss, loss)
        for one, other in zip(gradients, others, strict=True):
            assert torch.equal(one, other)
    row = SAMPLES * LENGTH * 8  # bytes for each feature of a float64 activation
    stream = row * SHAPE.hidden
    blocks = kept - results["full"][2]
    assert blocks > SHAPE.layers * 8 * stream, "of each block much more was kept than its input"
    assert results["full"][2] < kept / 4
    assert kept - results["selective"][2] >= SHAPE.layers * stream, "what the core of attention returned, at least"


@pytest.mark.parametrize("training", [True, False])
def test_a_recomputed_module_runs_again_only_in_a_backward_pass(training: bool) -> None:
    class Core(nn.Module):
        runs = 0

        def forward(self, x: Tensor, scale: float) -> Tensor:
            self.runs += 1
            return (x * scale).exp()

    core, x = Core(), torch.randn(3, requires_grad=True)
    with torch.set_grad_enabled(training):
        y = Recomputed(core)(x, 2.0)
    assert core.runs == 1
    assert torch.equal(y, (x * 2.0).exp())
    if training:
        y.sum().backward()
        assert core.runs == 2
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 2.0 * y.detach())


def test_only_the_core_of_attention_is_replaced_and_decoding_still_works() -> None:
    model, other = decoder(), decoder()
    selective(model)
    found = [name for name, one in model.named_modules() if isinstance(one, Recomputed)]
    assert found == [f"blocks.{i}.attn.core" for i in range(SHAPE.layers)]
    tokens = batch()["tokens"]
    with torch.no_grad():
        cache, its_cache = Cache(), Cache()
        for part in (tokens[:, :3], tokens[:, 3:4]):
            assert torch.equal(model.decode(part, cache), other.decode(part, its_cache))
