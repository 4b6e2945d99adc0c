"""A layer with experts beside a loop over its tokens and experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.config import parse
from shoal.errors import ConfigError
from shoal.model.activations import ACTIVATIONS
from shoal.model.context import Context
from shoal.model.decoder import Decoder
from shoal.model.gates import choose, keep, weigh
from shoal.model.grouped import expert_outputs
from shoal.model.routed import Routed
from shoal.train.setup import materialise_alone

SIZES = {"layers": 2, "hidden": 12, "heads": 2, "ffn": 16, "vocab": 20, "experts": 5, "expert_ffn": 7}


def layer_of(**settings: object) -> Routed:
    table = {"run": {"steps": 1}, "model": SIZES | settings, "data": {"source": "synthetic", "seq_len": 6, "batch": 2}}
    with torch.device("meta"):
        model = Decoder(parse(table).model).to(torch.float64)
    materialise_alone(model, 0)
    layer = model.blocks[-1].ffn
    assert isinstance(layer, Routed)
    return layer


def by_the_book(layer: Routed, x_BTH: Tensor, activation: str) -> Tensor:
    """Every token through each of its experts, one at a time."""
    gate, width = layer.gate, layer.experts.down.weight.shape[1]
    scores = F.linear(x_BTH, layer.router.weight)
    chosen = choose(scores, gate, layer.router.balance)
    kept, weights = keep(chosen, gate), weigh(scores, chosen, gate)
    gate_up = layer.experts.gate_up.weight.unflatten(0, (gate.experts, 2, width))
    down = layer.experts.down.weight.unflatten(0, (gate.experts, -1))
    rows = []
    for b, t in torch.cartesian_prod(torch.arange(len(x_BTH)), torch.arange(x_BTH.shape[1])).tolist():
        token = torch.zeros_like(x_BTH[b, t])
        for expert in kept[b, t].nonzero().flatten().tolist():
            inner = ACTIVATIONS[activation](gate_up[expert, 0] @ x_BTH[b, t]) * (gate_up[expert, 1] @ x_BTH[b, t])
            token = token + weights[b, t, expert] * (down[expert] @ inner)
        rows.append(token)
    routed = torch.stack(rows).view_as(x_BTH)
    return routed if layer.shared is None else routed + layer.shared(x_BTH)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shared_experts": 2, "activation": "gelu"},
        {"capacity": 0.6, "activation": "gelu-tanh"},
        {"gate": "expert-choice"},
        {"gate": "sigmoid", "gate_renormalise": True, "gate_scale": 2.5},
    ],
)
def test_the_layer_computes_what_a_loop_computes(settings: dict[str, object]) -> None:
    layer = layer_of(**settings)
    found, expected = [], []
    for compute, into in ((layer, found), (by_the_book, expected)):
        x = torch.randn(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
        layer.zero_grad()
        activation = str(settings.get("activation", "silu"))
        y = compute(x, Context(None, length=6, samples=2)) if compute is layer else by_the_book(layer, x, activation)
        y.square().sum().backward()
        into += [y.detach(), x.grad, *(one.grad for one in layer.parameters())]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_an_expert_without_rows_has_a_gradient_of_zero() -> None:
    gate_up, down = (torch.randn(3 * n, m, dtype=torch.float64, requires_grad=True) for n, m in ((8, 5), (5, 4)))
    x = torch.randn(6, 5, dtype=torch.float64)
    expert_outputs(x, gate_up, down, [2, 0, 4], ACTIVATIONS["silu"]).sum().backward()
    assert gate_up.grad is not None
    assert down.grad is not None
    assert not gate_up.grad[8:16].any()
    assert not down.grad[5:10].any()
    assert gate_up.grad[:8].any()
    assert down.grad[10:].any()


def test_the_bias_keeps_its_precision_and_its_values_on_the_meta_device() -> None:
    layer = layer_of(gate="sigmoid")
    assert layer.router.balance is not None
    layer.router.balance += 0.25
    assert layer.to(torch.bfloat16).router.balance.dtype == torch.float32  # type: ignore[union-attr]
    assert layer.router.weight.dtype == torch.bfloat16
    assert layer.to("meta").router.balance.tolist() == [0.25] * 5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"experts": 0}, "expert_ffn = 7: the model has no experts"),
        ({"experts_per_token": 6}, "experts_per_token = 6: there are 5 experts; use 5 or fewer"),
        ({"dense_layers": 2}, "dense_layers = 2: leaves none of 2 layers with experts; use 1 or fewer"),
        ({"gate_groups": 2}, r"gate_groups = 2: does not divide 5 experts; use one of \[1, 5\]"),
        ({"gate_groups": 5}, "gate_top_groups = 1: 1 experts are fewer than the 2 of a token; use 2 or more"),
        ({"gated": False}, "gated = false: experts are gated"),
        ({"gate": "sinkhorn", "gate_groups": 5}, "sinkhorn has no groups"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layer_of(**settings)
