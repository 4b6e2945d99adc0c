"""What the layers of a model cost, measured: bytes worked out by hand, at sizes that nothing divides, and times by a
clock that the layers wind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config import load
from shoal.errors import ConfigError
from shoal.layout import Layout
from shoal.memory.recompute import recomputed
from shoal.model.context import Batch
from shoal.model.linear import Linear, later
from shoal.model.task import PlainTask
from shoal.pipeline import measure as module
from shoal.pipeline.layer_costs import LayerCosts, by_stage
from shoal.pipeline.measure import measure
from shoal.train.setup import make_model, materialise_alone, open_data

ROWS, WORD = 7, 8
RUNS = Path(__file__).parents[2] / "runs"


def of(*layers: nn.Module, **options: Any) -> LayerCosts:
    """Of float64 layers that begin with three features a row."""
    task = PlainTask(nn.Sequential(*layers).double(), lambda output, _: output.square().sum())
    return measure(task, {"inputs": torch.randn(ROWS, 3, dtype=torch.float64)}, repeats=1, **options)


def features(*amounts: int) -> tuple[int, ...]:
    """In bytes, those of so many features a row."""
    return tuple(amount * ROWS * WORD for amount in amounts)


def test_what_a_layer_holds_keeps_and_makes() -> None:
    """Before and behind a linear map of ours is one of PyTorch's, whose weight's gradient is made at once."""
    costs = of(nn.Linear(3, 5), nn.Tanh(), Linear(5, 11), Linear(11, 2))
    # The first input is the micro-batch's. tanh holds its output, which is the next one's input. The last layer has the
    # loss, whose square holds the output.
    assert costs.held == features(0, 5, 5, 11 + 2)
    assert costs.own_output == (*features(0, 5, 0), 0)
    assert costs.common == (*features(0, 5, 0), 0)
    assert costs.kept == features(0, 0, 5 + 11, 11 + 2)  # both factors of the weight's gradient
    assert costs.kept_gradient == (*features(0, 0, 11), 0)
    assert costs.output == (*features(5, 5, 11), WORD)
    assert costs.parameters == tuple(WORD * count for count in (4 * 5, 0, 6 * 11, 12 * 2))
    assert costs.context == (0, 0, 0, 0)
    assert costs.weight_gradient[:2] == (0.0, 0.0)
    assert min(costs.weight_gradient[2:]) > 0


def test_neighbours_in_a_stage_hold_what_is_between_them_once() -> None:
    costs = by_stage(of(nn.Linear(3, 5), nn.Tanh(), Linear(5, 11), Linear(11, 2)), [range(2), range(2, 4)])
    together = by_stage(of(nn.Linear(3, 5), nn.Tanh(), Linear(5, 11), Linear(11, 2)), [range(3), range(3, 4)])
    assert costs.held == features(5, 5 + 11 + 2)
    assert costs.shared == (*features(5), 0)
    assert costs.boundary == (*features(5), WORD)
    assert together.held == features(5, 11 + 2)
    assert together.shared == (0, 0)


class Pair(nn.Module):
    """Hands over two tensors and a number; the second is its own input."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x.exp(), {"x": x, "scale": 2}


class Product(nn.Module):
    def forward(self, x: tuple[Tensor, dict[str, Any]]) -> Tensor:
        return x[0] * x[1]["x"] * x[1]["scale"]


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


def test_tensors_in_containers_between_layers_count_one_by_one() -> None:
    costs = of(nn.Linear(3, 5), Pair(), Product(), InPlace(), nn.Linear(5, 1))
    assert costs.held[1:4] == features(5, 10, 0)  # exp holds its output; a product, both factors
    assert costs.output[1:3] == features(10, 5)
    assert costs.common[1] == features(5)[0]
    assert by_stage(costs, [range(1), range(1, 4), range(4, 5)]).held[1] == features(10)[0]


def test_a_layer_without_gradients_holds_nothing() -> None:
    frozen = nn.Linear(3, 5)
    frozen.requires_grad_(False)
    costs = of(frozen, nn.Tanh(), Linear(5, 2))
    assert costs.held == features(0, 0, 5 + 2)
    assert costs.parameters[0] == costs.backward_peak[0] == 0


def test_what_is_recomputed_holds_its_input() -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        wide = nn.Sequential(Linear(5, 50), nn.Tanh(), Linear(50, 4))
        return [nn.Linear(3, 5), wide, nn.Linear(4, 1)]

    kept, made = of(*layers()), layers()
    again = of(*made, runs=[lambda x, _, run=run: run(x) for run in (made[0], recomputed(made[1]), made[2])])
    assert kept.held[1] == features(5 + 50)[0]
    assert again.held[1] == features(5)[0]
    assert again.kept == kept.kept
    assert again.input_gradient_peak[1] - kept.input_gradient_peak[1] >= features(50)[0]


# ---- several layers as one


def merged(runs: Sequence[Callable[[Any, Any], Any]]) -> Callable[[Any, Any], Any]:
    def run(x: Any, ctx: Any) -> Any:
        for one in runs:
            x = one(x, ctx)
        return x

    return run


def small_decoder(**settings: object) -> tuple[Any, Batch]:
    given = {"layers": 4, "hidden": 24, "heads": 6, "kv_heads": 3, "ffn": 37, "vocab": 53, "dropout": 0, **settings}
    config = load(
        RUNS / "tiny.toml", ["data.seq_len=13", "data.batch=3", *(f"model.{k}={v}" for k, v in given.items())]
    )
    model = make_model(config, Layout.parse("dp=1,dtype=float64"))
    materialise_alone(model, seed=0)
    return model, open_data(config).batch(0)


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"positions": "learned", "qkv_bias": "true"}, marks=pytest.mark.parity)], ids=str
)
def test_a_stage_costs_what_its_layers_do_together(settings: dict[str, object]) -> None:
    """Measured as one layer, and made up of what was measured of each: bytes are the same, within the passes, too.
    In a stage the gradient of its output counts as there before, and stays to the end."""
    task, batch = small_decoder(**settings)
    stages = [range(0, 3), range(3, 6)]
    runs = [lambda x, ctx, layer=layer: task.apply_layer(layer, x, ctx) for _, layer in task.layers()]
    found = by_stage(measure(task, batch, repeats=1), stages)
    whole = measure(task, batch, repeats=1, runs=[merged([runs[unit] for unit in stage]) for stage in stages])
    assert found.boundary == whole.output
    assert found.kept == whole.kept
    context = [2 * 13 * 3 * 2 * WORD * ("positions" not in settings)] * 2  # cosines and sines of half a head
    assert whole.context == tuple(context)
    assert found.held == tuple(map(sum, zip(whole.held, context, strict=True)))
    assert found.forward_peak == tuple(map(sum, zip(whole.forward_peak, context, strict=True)))
    for name in ("backward_peak", "input_gradient_peak"):
        of_first, of_last = getattr(found, name)
        assert (of_first + whole.output[0], of_last) == getattr(whole, name), name


# ---- times

SECONDS = {"forward": 3.0, "input": 5.0, "weight": 7.0}


class Clock:
    now = 0.0
    factor = 1.0

    def perf_counter(self) -> float:
        return self.now

    def wind(self, seconds: float) -> None:
        self.now += self.factor * seconds


class Takes(nn.Module):
    """Takes its time, which passes by no clock on the wall."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.weight = clock, nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Takes.apply(x, self.weight, self.clock)
        return y


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, clock: Clock) -> Tensor:
        clock.wind(SECONDS["forward"])
        ctx.weight, ctx.clock = weight, clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.wind(SECONDS["input"])
        later(ctx.weight, lambda: ctx.clock.wind(SECONDS["weight"]))
        return grad, None, None


def test_times_are_medians_of_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round takes ten times as long, and so do two of five others: neither shows."""
    clock, told = Clock(), list[tuple[int, int]]()
    monkeypatch.setattr(module, "time", clock)
    factors = iter((10.0, 1.0, 10.0, 1.0, 10.0, 1.0, 1.0, 1.0))

    def seen(done: int, of: int) -> None:
        told.append((done, of))
        clock.factor = next(factors)

    clock.factor = next(factors)
    task = PlainTask(nn.Sequential(Takes(clock), nn.Tanh(), Takes(clock)), lambda output, _: output.sum())
    costs = measure(task, {"inputs": torch.ones(2, 1)}, repeats=5, seen=seen)
    for name, kind in (("forward", "forward"), ("input_gradient", "input"), ("weight_gradient", "weight")):
        assert getattr(costs, name) == (SECONDS[kind], 0.0, SECONDS[kind])
    assert told == [(done, 7) for done in range(1, 8)]
    stages = by_stage(costs, [range(2), range(2, 3)], transfer=0.5)
    assert (stages.forward, stages.input_gradient, stages.weight_gradient) == ((3.0, 3.0), (5.0, 5.0), (7.0, 7.0))
    assert stages.transfer == 0.5


# ---- what it leaves behind, and what it refuses


def test_a_task_is_left_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(), Linear(5, 2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    batch = {"inputs": torch.randn(ROWS, 3)}
    drawn = torch.get_rng_state()
    measure(PlainTask(net, lambda output, _: output.sum()), batch, repeats=1)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(one.grad is None and not hasattr(one, "sink") for one in net.parameters())


def test_parameters_without_values_are_refused() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 5))
    with pytest.raises(ConfigError, match=r"0\.weight has no values; give it some first, by shoal\.local\.materialise"):
        measure(PlainTask(net, lambda output, _: output.sum()), {"inputs": torch.randn(ROWS, 3)})
