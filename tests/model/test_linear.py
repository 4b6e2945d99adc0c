from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.model.linear import Linear, attach_sink, weight_gradient

ROWS = {"matrix": (6, 5), "batch": (2, 3, 5), "vector": (5,), "none": (0, 5)}


class Adds:
    """A sink that adds up, and counts."""

    def __init__(self, weight: Tensor) -> None:
        self.gradient, self.times = torch.zeros_like(weight), 0

    def add_product(self, left: Tensor, right: Tensor) -> None:
        self.gradient.addmm_(left.t(), right)
        self.times += 1


def pair(bias: bool, sink: bool) -> tuple[nn.Linear, Linear, Adds | None]:
    """``nn.Linear`` and a :class:`Linear` of the same values."""
    plain, own = nn.Linear(5, 4, bias=bias).double(), Linear(5, 4, bias=bias).double()
    own.load_state_dict(plain.state_dict())
    adds = Adds(own.weight) if sink else None
    if adds:
        attach_sink(own.weight, adds)
    return plain, own, adds


def run(layer: nn.Linear, shape: tuple[int, ...], recompute: bool, x_grad: bool = True) -> tuple[Tensor, Tensor]:
    """Output and input of a pass, whose input is not contiguous and whose output's gradient is not uniform."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((*shape, 2), generator=generator, dtype=torch.float64)[..., 0].requires_grad_(x_grad)
    call: Any = partial(checkpoint, layer, use_reentrant=False) if recompute else layer
    y = call(x)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64))
    return y.detach(), x


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_outputs_and_gradients_are_those_of_a_plain_linear(rows: str, bias: bool, sink: bool, recompute: bool) -> None:
    """With a sink the weight's gradient is there, once a pass, and autograd has none."""
    plain, own, adds = pair(bias, sink)
    for times in (1, 2):
        (y, x), (expected, its_x) = (run(layer, ROWS[rows], recompute) for layer in (own, plain))
        found = own.weight.grad if adds is None else adds.gradient
        pairs = [(y, expected), (x.grad, its_x.grad), (found, plain.weight.grad)]
        if bias:
            pairs.append((own.bias.grad, plain.bias.grad))
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
        assert adds is None or (own.weight.grad, adds.times) == (None, times)


@pytest.mark.parametrize("sink", [False, True])
def test_nothing_is_computed_for_what_needs_no_gradient(sink: bool) -> None:
    for frozen in ("weight", "bias", "input"):
        plain, own, adds = pair(bias=True, sink=sink)
        for layer in (plain, own):
            if frozen != "input":
                layer.get_parameter(frozen).requires_grad_(False)
        (y, x), (expected, its_x) = (run(layer, (6, 5), False, frozen != "input") for layer in (own, plain))
        assert torch.equal(y, expected)
        weight = own.weight.grad if adds is None or frozen == "weight" else adds.gradient
        for one, other in ((x.grad, its_x.grad), (weight, plain.weight.grad), (own.bias.grad, plain.bias.grad)):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
        assert adds is None or adds.times == (frozen != "weight")


def test_without_gradients_nothing_is_kept_and_the_sink_is_not_asked() -> None:
    _, own, adds = pair(bias=True, sink=True)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        y = own(x)
    assert y.grad_fn is None
    assert torch.equal(y, own(x))
    with torch.inference_mode():
        assert torch.equal(own(x), y)
    assert adds is not None
    assert adds.times == 0


def test_a_weight_that_several_maps_share_gives_all_its_products_to_one_sink() -> None:
    plain, own, adds = pair(bias=False, sink=True)
    other = Linear(5, 4, bias=False)
    other.weight = own.weight
    run(other, (6, 5), False)
    run(own, (2, 3, 5), False)
    run(plain, (6, 5), False)
    run(plain, (2, 3, 5), False)
    assert adds is not None
    assert adds.times == 2
    torch.testing.assert_close(adds.gradient, plain.weight.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("sink", [False, True])
def test_the_gradient_of_a_weight_from_its_two_factors(sink: bool) -> None:
    _, own, adds = pair(bias=False, sink=sink)
    grad, x = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 5).double()
    found = weight_gradient(own.weight, grad, x)
    assert (found is None) == sink
    expected = torch.einsum("bto,bti->oi", grad, x)
    torch.testing.assert_close(adds.gradient if adds else found, expected, rtol=1e-13, atol=1e-13)


def test_a_sink_has_no_second_derivative() -> None:
    layer, x = Linear(3, 2, bias=False), torch.randn(4, 3, requires_grad=True)
    attach_sink(layer.weight, Adds(layer.weight))
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
