from __future__ import annotations

import faulthandler
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from replicas import plain
from torch import Tensor, nn

from shoal.config import Optimizer
from shoal.data_parallel.buckets import build_buckets
from shoal.data_parallel.flat import Flat, close, is_open, open_
from shoal.errors import ConfigError
from shoal.local import LocalParameter
from shoal.mesh import Grid
from shoal.optim.treatment import Treatments
from shoal.placement import divide, whole

SHAPES = ((3, 4), (5,), (0,), ())  # 18 elements: of two ranks, each has 9


def held(values: list[Tensor]) -> list[LocalParameter]:
    who = plain(0, 1)
    ones = [
        LocalParameter(f"p{i}", nn.Parameter(value.clone()), (0,), whole(f"p{i}", value.shape), (who,))
        for i, value in enumerate(values)
    ]
    drawn = nn.Parameter(torch.empty(()).expand(3, 4))
    return [replace(ones[0], parameter=drawn, drawn=values[0].to), *ones[1:]]


def make(rank: int = 1, keep_params: bool = True, keep_grads: bool = True) -> tuple[Flat, list[Tensor]]:
    """Parameters, of which the first has values to be drawn and no memory yet, on one of two ranks."""
    values = [torch.randn(shape) for shape in SHAPES]
    cut = partial(divide, grid=Grid((("dp", 2),)), rank=rank, size=2)
    (bucket,) = build_buckets(held(values), cut, Treatments(Optimizer()))
    return Flat(bucket, keep_params=keep_params, keep_grads=keep_grads), values


def test_parameters_become_views_and_keep_their_values() -> None:
    flat, values = make()
    for slot, value in zip(flat.bucket.slots, values, strict=True):
        assert torch.equal(slot.held.parameter, value)
        assert torch.equal(slot.of(flat.params), value)
    assert [tensor.numel() for tensor in (flat.params, flat.grads, flat.own_params, flat.own_grads)] == [18, 18, 9, 9]
    assert {name: len(state) for name, state in flat.states.items()} == {"exp_avg": 9, "exp_avg_sq": 9}
    assert not any(tensor.any() for tensor in (flat.grads, *flat.states.values()))
    flat.own_params.fill_(7.0)
    flat.own_grads.fill_(7.0)
    assert flat.bucket.slots[1].held.parameter.eq(7).all()
    assert flat.grads.tolist() == [0.0] * 9 + [7.0] * 9
    flat.check_views()


def test_a_parameter_whose_data_was_replaced_is_found() -> None:
    flat, _ = make()
    one = flat.bucket.slots[1].held
    with torch.no_grad():
        one.parameter.mul_(2)
        flat.check_views()
        one.parameter.data = one.parameter.detach().clone()
    with pytest.raises(ConfigError, match="p1 was given other memory after the engine was made"):
        flat.check_views()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_divided_is_its_part_alone_until_it_is_opened(rank: int) -> None:
    """Views that autograd saved before stay good."""
    flat, values = make(rank, keep_params=False, keep_grads=False)
    weight, x = flat.bucket.slots[0].held.parameter, torch.randn(2, 4, requires_grad=True)
    full, mine = flat.params.clone(), slice(9 * rank, 9 * rank + 9)
    flat.grads.copy_(full)
    output = F.linear(x, weight)
    flat.release_whole()
    flat.check_views()
    assert torch.equal(flat.own_params, full[mine])
    assert torch.equal(flat.own_grads, full[mine])
    sizes = [tensor.untyped_storage().nbytes() for tensor in (flat.params, flat.grads, flat.own_params, flat.own_grads)]
    assert sizes == [0, 0, 36, 36]
    for tensor in (flat.params, flat.grads):
        assert not is_open(tensor)
        open_(tensor)
        assert is_open(tensor)
        tensor.copy_(full)
    output.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, values[0].sum(0).expand(2, 4))
    assert torch.equal(weight, values[0])
    flat.check_views()
    close(flat.params)
    assert flat.params.untyped_storage().nbytes() == 0
    assert is_open(torch.zeros(0)), "without elements there is nothing to open"


def ends(read: Callable[[Tensor], object], weight: Tensor) -> str:
    """What comes of reading ``weight`` in a process of its own: "a value", the error's name, or the signal's number."""

    def attempt() -> None:
        faulthandler.disable()
        try:
            read(weight)
        except RuntimeError:
            raise SystemExit(3) from None

    child = multiprocessing.get_context("fork").Process(target=attempt)
    child.start()
    child.join(20)
    return {0: "a value", 3: "an error"}.get(child.exitcode or 0, f"signal {-(child.exitcode or 0)}")


READS: dict[str, Callable[[Tensor], object]] = {
    "linear": lambda weight: F.linear(torch.ones(2, 4), weight),
    "embedding": lambda weight: F.embedding(torch.tensor([1]), weight),
    "an element": lambda weight: weight[0, 0].item(),
    "sum": lambda weight: weight.sum(),
    "clone": lambda weight: weight.detach().clone(),
    "list": lambda weight: weight.tolist(),
}


@pytest.mark.parametrize("name", READS)
def test_a_closed_parameter_cannot_be_read(name: str) -> None:
    """It is an error or the end of the process, and never a value."""
    flat, _ = make(keep_params=False)
    weight = flat.bucket.slots[0].held.parameter
    assert ends(READS[name], weight) == "a value"
    flat.release_whole()
    assert ends(READS[name], weight) in ("an error", "signal 11")
