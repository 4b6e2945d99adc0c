"""The oracle of asynchronous pipelines, against recurrences on problems that are worked out without it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config import Optimizer, load
from shoal.data.batches import mask_labels
from shoal.layout import Layout
from shoal.train.delayed import DelayedTrainer, pipedream, two_bw
from shoal.train.reference import PlainTrainer
from shoal.train.setup import learning_rate, make_model, materialise_alone, open_data

RUNS = Path(__file__).parents[2] / "runs"


class Line(nn.Module):
    """y = Σ w_r x_r, each weight a stage of its own."""

    roles: Mapping[str, Any] = {}

    def __init__(self, *start: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.tensor([[w]], dtype=torch.float64)) for w in start])

    @property
    def values(self) -> list[float]:
        return [w.item() for w in self.weights]


def squared_error(trainer: DelayedTrainer) -> DelayedTrainer:
    """Its loss: ½(y − batch["y"])² summed over two samples, of which each counts."""

    def summed_loss(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        weights: Any = trainer.model.weights
        y = batch["x"] @ torch.cat(list(weights))
        return 0.5 * (y - batch["y"]).square().sum(), torch.tensor(len(y))

    trainer.summed_loss = summed_loss  # type: ignore[method-assign]
    return trainer


def train(kind: str, line: Any, config: Optimizer, rate: Any = lambda _: 1.0, micro_batches: int = 1) -> DelayedTrainer:
    stages = {f"weights.{r}": r for r in range(len(line.weights))}
    if kind == "2bw":
        return squared_error(two_bw(line, config, rate, 0))
    vertical = kind == "pipedream-vertical"
    return squared_error(pipedream(line, config, rate, 0, stages, micro_batches, vertical=vertical))


def half_square(trainer: DelayedTrainer) -> Mapping[str, Tensor]:
    """A batch for which the loss is ½w₀², or that of one weight alone."""
    count = len(trainer.model.values)
    x = torch.zeros(2, count, dtype=torch.float64)
    x[:, 0] = 1
    return {"x": x, "y": torch.zeros(2, 1, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("kind", "stages", "drain_after", "expected"),
    [
        ("2bw", 1, None, [1 / 2, 0, -1 / 4, -1 / 4, -1 / 8]),
        ("2bw", 1, 1, [1 / 2, 1 / 4, 0, -1 / 8, -1 / 8]),
        ("pipedream", 1, None, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]),
        ("pipedream", 3, None, [1 / 2, 0, -1 / 2, -3 / 4, -3 / 4]),
        ("pipedream", 3, 1, [1 / 2, 1 / 4, 0, -1 / 4, -3 / 8]),
        ("pipedream-vertical", 3, 1, [1 / 2, 1 / 4, 0, -1 / 4, -3 / 8]),
    ],
)
def test_halving_a_weight_by_gradients_of_old_ones(
    kind: str, stages: int, drain_after: int | None, expected: list[float]
) -> None:
    """w ← w − ½w' of the first weight, where w' is one, no or two updates old, from w = 1."""
    line = Line(1.0, *[0.0] * (stages - 1))
    trainer = train(kind, line, Optimizer(name="sgd", lr=0.5, weight_decay=0.0, clip=0.0))
    for number, value in enumerate(expected):
        if number == drain_after:
            trainer.drain()
        found = trainer.advance(half_square(trainer))
        assert found.weights["weights.0"].item() == line.values[0] == value


def by_hand(
    kind: str, config: Optimizer, start: list[float], data: list[Any], rates: list[float], drains: set[int]
) -> list[tuple[list[float], bool]]:
    """The recurrence in floats, one weight at a time: after every update, the weights and whether any was clipped."""
    last = len(start) - 1
    delays = {"2bw": [1] * len(start), "pipedream": [last - r for r in range(len(start))]}.get(
        kind, [last] * len(start)
    )
    versions, first, second, results = [start], [0.0] * len(start), [0.0] * len(start), []
    for number, (xs, ys) in enumerate(data):
        if number in drains:
            versions = [versions[-1]]
        t = len(versions) - 1
        old = [versions[max(0, t - delay)][r] for r, delay in enumerate(delays)]
        errors = [sum(w * v for w, v in zip(old, x, strict=True)) - y for x, y in zip(xs, ys, strict=True)]
        gradient = [sum(e * x[r] for e, x in zip(errors, xs, strict=True)) / len(ys) for r in range(len(start))]
        whole = sum(g * g for g in gradient) ** 0.5
        norms = [whole] * len(start) if kind == "2bw" else [abs(g) for g in gradient]
        gradient = [g * min(1.0, config.clip / n) for g, n in zip(gradient, norms, strict=True)]
        new, lr = [], config.lr * rates[number]
        for r, (w, g) in enumerate(zip(versions[t], gradient, strict=True)):
            if config.name == "sgd":
                g += config.weight_decay * w
                first[r] = config.momentum * first[r] + g
                new.append(w - lr * first[r])
            else:
                one, two = config.betas
                first[r] = one * first[r] + (1 - one) * g
                second[r] = two * second[r] + (1 - two) * g * g
                root = (second[r] / (1 - two ** (number + 1))) ** 0.5
                w *= 1 - lr * config.weight_decay
                new.append(w - lr * first[r] / (1 - one ** (number + 1)) / (root + config.eps))
        versions.append(new)
        results.append((new, any(n > config.clip for n in norms)))
    return results


@pytest.mark.parametrize("kind", ["pipedream", "pipedream-vertical", "2bw"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("drained", [(), (2,), (1, 3)])
def test_momentum_adam_decay_clipping_and_the_rate_follow_the_recurrence(
    kind: str, optimizer: str, drained: tuple[int, ...]
) -> None:
    """Six steps, of PipeDream two micro-batches each, drained before some of them."""
    config = Optimizer(name=optimizer, lr=0.2, momentum=0.9, weight_decay=0.1, clip=0.8)
    start, generator = [1.5, -0.5, 0.75], torch.Generator().manual_seed(0)
    each = 1 if kind == "2bw" else 2
    data = [
        (torch.randn(2, 3, generator=generator, dtype=torch.float64), torch.randn(2, generator=generator).double())
        for _ in range(6 * each)
    ]
    rates = [1 / (1 + number // each) for number in range(6 * each)]
    rows = [(x.tolist(), y.tolist()) for x, y in data]
    truth = by_hand(kind, config, start, rows, rates, {step * each for step in drained})
    assert {clipped for _, clipped in truth} == {True, False}
    trainer = train(kind, Line(*start), config, lambda step: 1 / (1 + step), micro_batches=each)
    for number, ((x, y), (expected, _)) in enumerate(zip(data, truth, strict=True)):
        if number in {step * each for step in drained}:
            trainer.drain()
        found = trainer.advance({"x": x, "y": y[:, None]})
        weights = [found.weights[f"weights.{r}"].item() for r in range(3)]
        assert weights == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert len(found.norms) == (1 if kind == "2bw" else 3)
        assert sum(n * n for n in found.norms) ** 0.5 == pytest.approx(found.grad_norm, rel=1e-12)


@pytest.mark.parametrize("kind", ["pipedream", "2bw"])
def test_without_delay_a_decoder_is_trained_as_by_the_plain_trainer(kind: str) -> None:
    """PipeDream of one stage, and the batches of 2BW after a drain: a loss of unequally masked tokens, a clip, dropout
    and the learning rate of the step."""
    settings = ("optimizer.clip=0.1", "model.tied=true", "model.layers=2", "data.batch=3")
    config = load(RUNS / "tiny.toml", settings)
    trainers: list[PlainTrainer] = []
    for delayed in (True, False):
        model = make_model(config, Layout.parse("dtype=float64"))
        materialise_alone(model, config.run.seed)
        common = model, config.optimizer, learning_rate(config), config.run.seed
        if not delayed:
            trainers.append(PlainTrainer(*common))
        elif kind == "2bw":
            trainers.append(two_bw(*common))
        else:
            trainers.append(pipedream(*common, dict.fromkeys(dict(model.named_parameters()), 0), 1))
    source = open_data(config)
    for step in range(3):
        batch = mask_labels(source.batch(step), config.run.seed)
        found, expected = (trainer.step(batch) for trainer in trainers)
        assert found.loss == pytest.approx(expected.loss, rel=1e-15)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-15)
        assert found.grad_norm > config.optimizer.clip
        for name, weight in expected.weights.items():
            assert torch.equal(found.weights[name], weight)
        trainers[0].drain()
