"""A backward pass in two: input gradients first, weight gradients when there is time.

On one process, whose steps are programs written out here: I makes what a stage before is waiting for, W the rest.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config import Optimizer
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.model.linear import Linear
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Act, Op, Program

OPS = {op.value: op for op in (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)}
WHOLE = "F0 B0 F1 B1 F2 B2"
SPLIT = "F0 I0 W0 F1 I1 W1 F2 I2 W2"
LATE = "F0 F1 F2 I0 I1 I2 W0 W1 W2"


class Deep(nn.Module):
    """A residual layer of two linears, with biases, an activation that keeps its input, and a norm."""

    def __init__(self, shared: Linear | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), shared or Linear(6, 10), Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Foreign(nn.Module):
    """A layer whose weights are used by PyTorch's own products."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.full((6,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


def deep() -> list[nn.Module]:
    return [Deep(), Deep()]


def frozen() -> list[nn.Module]:
    layers = deep()
    for one in (layers[0].up, layers[1].down):
        assert isinstance(one, Linear)
        one.weight.requires_grad_(False)
    return layers


def frozen_first() -> list[nn.Module]:
    first, second = deep()
    return [first.requires_grad_(False), second]


def twice() -> list[nn.Module]:
    """A linear of two layers, and one that a layer uses twice."""
    shared = Linear(6, 10)
    return [Deep(shared), nn.Sequential(Linear(6, 6), nn.Tanh()), Deep(shared), Again()]


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))  # type: ignore[no-any-return]


def foreign() -> list[nn.Module]:
    return [Foreign(), Foreign()]


def mixed() -> list[nn.Module]:
    return [Deep(), Foreign(), Again()]


def engine_of(
    layers: Callable[[], list[nn.Module]], program: str, line: str = "", dtype: Any = torch.float64
) -> Engine:
    """An engine of one process whose step is ``program``."""
    torch.manual_seed(0)
    module = nn.Sequential(*layers()).to(dtype)
    # A split schedule, so that weights have sinks and can wait.
    layout = Layout.parse(f"pp=1:zb-h1,mb=3{line}")
    optimizer = Optimizer(name="sgd", lr=0.1, clip=0.0)
    engine = Engine(module, layout, optimizer=optimizer, loss=lambda y, batch: (y * batch["targets"]).sum())
    acts = tuple(Act(OPS[word[0]], 0, int(word[1])) for word in program.split())
    engine._programs = replace(engine._programs, train=lower((Program((0,), 3, acts),))[0])
    return engine


def batch(dtype: Any = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(6, 6, generator=generator, dtype=torch.float64).to(dtype) for name in ("inputs", "targets")
    }


def gradients(engine: Engine, given: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Those of a step."""
    found: dict[str, Tensor] = {}
    engine.on_gradients = lambda: found.update({one.piece.name: one.tensor.clone() for one in engine.gradients()})
    engine.step(given or batch())
    assert found
    assert all(one.any() for one in found.values())
    return found


LAYERS = [deep, frozen, frozen_first, twice, foreign, mixed]


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("program", [SPLIT, LATE, "F0 F1 I0 F2 W0 I1 I2 W1 W2"])
def test_both_halves_make_the_gradients_of_the_whole_bit_for_bit(
    layers: Callable[[], list[nn.Module]], program: str
) -> None:
    """Where weight gradients are made in the order of the backward passes. A weight that several places use, and what
    cannot wait, may be summed in another order."""
    found, expected = gradients(engine_of(layers, program)), gradients(engine_of(layers, WHOLE))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-14, atol=1e-14)
        if layers is not twice:
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("program", ["F0 F1 F2 I0 I1 I2 W2 W0 W1", "F0 F1 I1 F2 I2 W2 I0 W1 W0"])
def test_weight_gradients_may_be_made_in_any_order(layers: Callable[[], list[nn.Module]], program: str) -> None:
    found, expected = gradients(engine_of(layers, program)), gradients(engine_of(layers, WHOLE))
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("program", [SPLIT, LATE])
def test_half_precision_adds_up_as_it_does_in_one_pass(program: str) -> None:
    """Into float32, once for each micro-batch."""
    given = batch(torch.bfloat16)
    found, expected = (
        gradients(engine_of(deep, words, ",dtype=bf16", torch.bfloat16), given) for words in (program, WHOLE)
    )
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected[name]), name


def test_a_second_step_starts_from_nothing() -> None:
    """Nothing that waited is made again, and no gradient is left over."""
    split, plain = engine_of(mixed, LATE), engine_of(mixed, WHOLE)
    for _ in range(3):
        found, expected = gradients(split), gradients(plain)
        assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


# ---- what waits


def watched(engine: Engine) -> list[int]:
    """How many contributions wait at the end of each input-gradient pass."""
    handlers, told, lists = engine._executor._handlers, [], []

    def note(waiting: list[Any] | None) -> None:
        handlers.postpone(waiting)
        if waiting is None:
            told.append(len(lists[-1]))
        else:
            lists.append(waiting)

    engine._executor._handlers = replace(handlers, postpone=note)
    return told


@pytest.mark.parametrize(
    ("layers", "count"),
    [(deep, 4), (frozen, 2), (frozen_first, 2), (twice, 7), (foreign, 0), (mixed, 4)],
)
def test_the_products_of_linears_wait_and_nothing_else(layers: Callable[[], list[nn.Module]], count: int) -> None:
    """One for each use of a weight that trains. A module that knows no deferred form does all its work at once."""
    engine = engine_of(layers, LATE)
    told = watched(engine)
    gradients(engine)
    assert told == [count] * 3


class Wide(nn.Module):
    """A linear between activations that autograd keeps: e^x keeps its result, x² what it is given."""

    def __init__(self, made: list[tuple[str, weakref.ref[Tensor]]]) -> None:
        super().__init__()
        self.linear, self.made = Linear(6, 6), made

    def forward(self, x: Tensor) -> Tensor:
        before = x.exp().tanh()
        after = self.linear(before)
        result = (after.square() + 1).log()
        self.made += [("input", _storage(before)), ("kept", _storage(after)), ("kept", _storage(result))]
        return result  # type: ignore[no-any-return]


def _storage(tensor: Tensor) -> weakref.ref[Any]:
    return weakref.ref(tensor.untyped_storage())


def test_between_its_halves_only_inputs_and_output_gradients_of_linears_are_in_memory() -> None:
    made: list[tuple[str, weakref.ref[Any]]] = []
    engine = engine_of(lambda: [Wide(made), Wide(made)], LATE)
    handlers, alive = engine._executor._handlers, []

    def note(waiting: list[Any] | None) -> None:
        handlers.postpone(waiting)
        if waiting is None:
            alive.append([word for word, storage in made[: 6 * (len(alive) + 1)] if storage() is not None])

    engine._executor._handlers = replace(handlers, postpone=note)
    gc.disable()  # what only the collector can free would stay for a while
    try:
        gradients(engine)
        assert len(made) == 18
        assert [words.count("input") for words in alive] == [2, 4, 6]
        assert all(storage() is None for _, storage in made), "after the weight gradients nothing is left"
    finally:
        gc.enable()


def test_every_weight_gradient_frees_what_it_was_made_of() -> None:
    """One by one, not all at the end."""
    made: list[tuple[str, weakref.ref[Any]]] = []
    engine = engine_of(lambda: [Wide(made), Wide(made)], LATE)
    handlers, lists, left = engine._executor._handlers, [], []

    def counting(contribution: Callable[[], None]) -> None:
        left.append(sum(storage() is not None for word, storage in made if word == "input"))
        contribution()

    def note(waiting: list[Any] | None) -> None:
        handlers.postpone(waiting)
        if waiting is None:
            lists[-1][:] = [partial(counting, contribution) for contribution in lists[-1]]
        else:
            lists.append(waiting)

    engine._executor._handlers = replace(handlers, postpone=note)
    gc.disable()
    try:
        gradients(engine)
        assert left == [6, 5, 4, 3, 2, 1]
    finally:
        gc.enable()


# ---- recomputation


class Counted(nn.Module):
    """A layer that counts how often it runs."""

    def __init__(self, runs: list[str], name: str) -> None:
        super().__init__()
        self.inner, self.runs, self.name = Deep(), runs, name

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(self.name)
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("program", [WHOLE, SPLIT, LATE])
def test_what_is_recomputed_runs_twice_not_three_times(program: str) -> None:
    """Once for the output, once for the input gradient; what the weight gradient needs waits from then."""
    runs: list[str] = []
    layers = lambda: [Counted(runs, "a"), Counted(runs, "b"), Counted(runs, "c")]  # noqa: E731
    found = gradients(engine_of(layers, program, ",recompute=full"))
    assert (runs.count("a"), runs.count("b"), runs.count("c")) == (6, 6, 3)  # the last layer is kept
    plain = gradients(engine_of(layers, WHOLE))
    assert all(torch.equal(gradient, plain[name]) for name, gradient in found.items())
