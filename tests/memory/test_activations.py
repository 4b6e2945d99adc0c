"""Activations that go and come back: which, when, how often, and that nothing else changes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shoal.memory.activations import LEAST, Offload, chosen
from shoal.memory.on_disk import OnDisk
from shoal.memory.on_host import OnHost
from shoal.memory.recompute import recomputed
from shoal.memory.swap import SwapFailed
from shoal.meter import HOST, Meter

CPU = torch.device("cpu")
ROWS, WIDTH = 64, 33
WORDS = ROWS * WIDTH
assert WORDS * 8 > LEAST


class Event(NamedTuple):
    """``what`` happened to storage number ``which``, in the order in which they went."""

    what: str
    which: int


class Written(OnHost):
    """Writes down what goes and comes."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.events: list[Event] = []
        self.sizes: list[int] = []

    def put(self, data: Tensor) -> Any:
        away, number = super().put(data), len(self.sizes)
        self.sizes.append(len(data))
        self.events.append(Event("goes", number))
        fetch = away.fetch

        def fetched() -> Any:
            self.events.append(Event("comes", number))
            return fetch()

        away.fetch = fetched  # type: ignore[method-assign]
        return away


class Layer(nn.Module):
    """Keeps its input for the weight, the output of tanh (which the next layer keeps as its input, too), and something
    small."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), act
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        return self.act(self.linear(x) * self.scale)


def layers(count: int) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer() for _ in range(count)]


def inputs(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()


Run = Callable[[Tensor, Any], Tensor]


def stage(those: Sequence[Layer], elsewhere: OnHost | OnDisk, goes: Sequence[int] | None = None) -> list[Run]:
    offload = Offload(elsewhere, CPU)
    return [
        offload.around(lambda x, ctx, layer=layer: layer(x, ctx), layer, first=at == 0, goes=goes is None or at in goes)
        for at, layer in enumerate(those)
    ]


def forward(runs: Sequence[Run], x: Tensor) -> Tensor:
    for run in runs:
        x = run(x, None)
    return x


def gradients(those: Sequence[Layer], xs: Sequence[Tensor]) -> list[Tensor]:
    return [
        one.grad.clone() for one in (*xs, *(p for layer in those for p in layer.parameters())) if one.grad is not None
    ]


@pytest.fixture(params=["host", "disk"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> OnHost | OnDisk:
    return OnHost(CPU) if request.param == "host" else OnDisk(CPU, tmp_path)


def test_gradients_are_the_same_to_the_last_bit_in_whatever_order_the_passes_come(elsewhere: OnHost | OnDisk) -> None:
    """Several micro-batches under way; and a backward pass that begins in the middle of a stage."""
    found = []
    for offloaded in (False, True):
        those = layers(6)
        runs: Sequence[Any] = stage(those, elsewhere) if offloaded else those
        xs = [inputs(seed) for seed in range(3)]
        outputs = [forward(runs, x) for x in xs]
        early = forward(runs[:3], xs[0])
        for which in (1, 2, 0):
            outputs[which].square().sum().backward()
        early.sum().backward()
        found.append(gradients(those, xs))
    assert len(found[0]) == 3 + 6 * 3
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_storage_goes_once_and_comes_back_a_unit_ahead() -> None:
    """Of each layer: what tanh made, which the next layer keeps too, and the product before it; of the first one its
    input. When the backward pass comes to a unit, what it lacks comes, then what the unit before it needs."""
    elsewhere = Written()
    runs = stage(layers(3), elsewhere)
    y = forward(runs, inputs(0))
    assert elsewhere.sizes == [WORDS * 8] * 7
    assert [event.what for event in elsewhere.events] == ["goes"] * 7
    elsewhere.events.clear()
    reached: list[int] = []
    y.register_hook(lambda _: reached.append(len(elsewhere.events)))
    y.sum().backward()
    assert reached == [5]  # all of the last unit and of the one before it, of which they share one
    assert [event.which for event in elsewhere.events] == [4, 5, 6, 2, 3, 0, 1]


def test_what_stays_is_small_or_a_parameter_or_belongs_to_a_unit_that_stays() -> None:
    elsewhere = Written()
    those = layers(3)
    forward(stage(those, elsewhere, goes=[]), inputs(0))
    assert elsewhere.sizes == []
    wide = those[0].linear.weight
    assert wide.numel() * 8 >= LEAST  # it is kept by its unit, and might go
    forward(stage(those, elsewhere, goes=[1]), inputs(0))
    assert len(elsewhere.sizes) == 3


def test_the_device_holds_two_units_of_a_deep_model(elsewhere: OnHost | OnDisk) -> None:
    """And buffers, those on their way to the disk and back."""
    held = {}
    for offloaded in (False, True):
        those = layers(12)
        runs: Sequence[Any] = stage(those, elsewhere) if offloaded else those
        with Meter() as meter:
            meter.label("params", (p for layer in those for p in layer.parameters()))
            with meter.phase("forward"):
                y = forward(runs, inputs(0)).sum()
            held[offloaded] = meter.peak("forward"), meter.host_peak("forward")
            with meter.phase("backward"):
                y.backward()
            held[offloaded] += (meter.peak("backward"), meter.live(HOST))
        del y
    word = WORDS * 8
    assert held[False][1] == 0
    if isinstance(elsewhere, OnHost):
        assert held[True][1] == 25 * word
        assert held[True][3] == 0, "what autograd has let go of is nowhere"
    else:
        assert held[True][1] < 9 * (word + 4096)
        assert held[True][3] < 9 * (word + 4096)
    assert held[False][0] - held[True][0] >= 22 * word
    gradients = sum(p.numel() for layer in those for p in layer.parameters()) * 8
    assert held[True][2] - held[True][0] < gradients + 6 * word


def test_a_recomputed_unit_sends_its_input_alone() -> None:
    elsewhere, those = Written(), layers(3)
    offload = Offload(elsewhere, CPU)
    runs = [
        offload.around(recomputed(lambda x, _, layer=layer: layer(x)), layer, first=at == 0, goes=True)
        for at, layer in enumerate(those)
    ]
    x = inputs(0)
    forward(runs, x).sum().backward()
    assert elsewhere.sizes == [WORDS * 8] * 3
    found = gradients(those, [x])
    others, x = layers(3), inputs(0)
    forward(others, x).sum().backward()  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(found, gradients(others, [x]), strict=True))


def test_a_kept_tensor_that_was_written_to_is_an_error_as_without_hooks() -> None:
    small = nn.Parameter(torch.ones(3))

    class Writes(nn.Module):
        def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
            y = x * small.exp()
            y2 = y * y
            y.detach().mul_(2)
            return y2

    (run,) = stage([Writes()], OnHost(CPU))  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(torch.ones(3, requires_grad=True), None).sum().backward()


def test_what_is_written_to_after_it_went_goes_again() -> None:
    """sigmoid_ keeps what it has made in the storage that the product before has kept as its input."""

    class Over(nn.Module):
        def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
            y = x * 2
            self.unused = y * y  # keeps y as it is now, for a backward pass that never comes
            return torch.sigmoid_(y)

    x, elsewhere = inputs(0), Written()
    (run,) = stage([Over()], elsewhere)  # type: ignore[list-item]
    run(x, None).sum().backward()
    assert len(elsewhere.sizes) == 2
    expected = inputs(0)
    torch.sigmoid(expected * 2).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]


def test_places_on_the_disk_are_used_again(tmp_path: Path) -> None:
    elsewhere = OnDisk(CPU, tmp_path)
    runs = stage(layers(6), elsewhere)
    for seed in range(3):
        forward(runs, inputs(seed)).sum().backward()
        places = elsewhere.files._begin
    forward(runs, inputs(4)).sum().backward()
    assert 0 < elsewhere.files._begin == places
    assert not elsewhere.buffers._lent
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_an_error_that_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SwapFailed, match=f"{tmp_path}.*No space left"):
        forward(stage(layers(6), OnDisk(CPU, tmp_path)), inputs(0))


def test_without_gradients_nothing_goes() -> None:
    elsewhere = Written()
    with torch.no_grad():
        forward(stage(layers(2), elsewhere), inputs(0))
    assert elsewhere.sizes == []


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(1.0, [3, 4, 5, 6, 7]), (0.5, [3, 5, 7]), (0.4, [3, 5]), (0.01, [3]), (0.8, [3, 4, 5, 6])],
)
def test_a_fraction_of_units_goes_evenly_spread(fraction: float, expected: list[int]) -> None:
    assert chosen(range(3, 8), fraction) == expected


def test_three_tenths_of_ten_units_are_three() -> None:
    assert len(chosen(range(10), 0.3)) == 3
    assert len(chosen(range(30), 0.1)) == 3
