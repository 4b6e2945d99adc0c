from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config import Optimizer
from shoal.optim.optimizers import Run, Updater, state_names

SHAPES = {"a": (4, 3), "b": (5, 2), "norm": (3,), "c": (2, 2, 2), "bias": (7,)}
FLAT_RUNS = (("a", "b"), ("norm",), ("c",), ("bias",))
RATES = (1.0, 0.5, 0.25, 1.0, 0.1)
FACTORS = (0.5, 1.0, 0.01, 0.0, 0.7)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
CONFIGS = {
    "adamw": Optimizer(name="adamw", lr=0.03, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3),
    "sgd": Optimizer(name="sgd", lr=0.03, weight_decay=0.3),
    "momentum": Optimizer(name="sgd", lr=0.03, momentum=0.9, weight_decay=0.3),
}


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in SHAPES.items()}


def flat(values: dict[str, Tensor], run: tuple[str, ...]) -> Tensor:
    return torch.cat([values[name].flatten() for name in run])


def runs(config: Optimizer, values: dict[str, Tensor]) -> list[Run]:
    made = []
    for names in FLAT_RUNS:
        params = flat(values, names)
        states = {state: torch.zeros_like(params) for state in state_names(config)}
        grads = torch.zeros_like(params)
        made.append(Run(params, lambda grads=grads: grads, states, decay=len(SHAPES[names[0]]) > 1))  # type: ignore[misc]
    return made


def set_gradients(given: list[Run], values: dict[str, Tensor]) -> None:
    for run, names in zip(given, FLAT_RUNS, strict=True):
        run.grads().copy_(flat(values, names))


def plain(config: Optimizer, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=False)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_flat_runs_are_updated_as_pytorch_updates_each_parameter(config: Optimizer, dtype: torch.dtype) -> None:
    """At every rate, and with gradients times every factor that clipping may ask for."""
    given = runs(config, tensors(0, dtype))
    updater = Updater(config, given)
    parameters = {name: nn.Parameter(value) for name, value in tensors(0, dtype).items()}
    reference = plain(config, parameters)
    close = partial(torch.testing.assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for step, (rate, factor) in enumerate(zip(RATES, FACTORS, strict=True)):
        gradients = tensors(step + 1, dtype)
        set_gradients(given, gradients)
        assert updater.update(rate, factor) == pytest.approx(0.03 * rate)
        for group in reference.param_groups:
            group["lr"] = 0.03 * rate
        for name, parameter in parameters.items():
            parameter.grad = gradients[name] * factor
        reference.step()
        for run, names in zip(given, FLAT_RUNS, strict=True):
            close(run.params, flat({name: p.detach() for name, p in parameters.items()}, names))
    for run, names in zip(given, FLAT_RUNS, strict=True):
        for state, found in run.states.items():
            expected = flat({name: reference.state[p][state] for name, p in parameters.items()}, names)
            close(found, expected)
    assert set(state_names(config)) == set(given[0].states)
    assert len(set(state_names(config))) == {"adamw": 2, "sgd": 1 if config.momentum else 0}[config.name]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_states_that_are_copied_in_go_on_where_they_were(config: Optimizer) -> None:
    straight, first = runs(config, tensors(0)), runs(config, tensors(0))
    whole, before = Updater(config, straight), Updater(config, first)
    for step in range(3):
        for given, updater in ((straight, whole), (first, before)):
            set_gradients(given, tensors(step + 1))
            updater.update(1.0)
    again = runs(config, tensors(99))
    after = Updater(config, again)
    after.set_steps(3)
    for old, new in zip(first, again, strict=True):
        new.params.copy_(old.params)
        for name, state in new.states.items():
            state.copy_(old.states[name])
    for given, updater in ((straight, whole), (again, after)):
        set_gradients(given, tensors(4))
        updater.update(1.0)
    assert all(torch.equal(one.params, other.params) for one, other in zip(straight, again, strict=True))


def test_without_parameters_there_is_nothing_to_update() -> None:
    updater = Updater(Optimizer(lr=0.5), [])
    updater.set_steps(3)
    assert updater.update(0.5) == 0.25
