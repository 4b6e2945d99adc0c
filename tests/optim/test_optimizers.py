from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.optim.optimizers import Updater
from shoal.optim.runs import Run
from shoal.optim.treatment import Treatment, state_names
from shoal.placement import whole
from shoal.train import textbook

SHAPES = {"a": (4, 3), "b": (5, 2), "norm": (3,), "c": (2, 2, 2), "bias": (7,)}
FLAT_RUNS = (("a", "b"), ("norm",), ("c",), ("bias",))
RATES = (1.0, 0.5, 0.25, 1.0, 0.1)
FACTORS = (0.5, 1.0, 0.01, 0.0, 0.7)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
CONFIGS = {
    "adamw": Optimizer(name="adamw", lr=0.03, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3),
    "sgd": Optimizer(name="sgd", lr=0.03, weight_decay=0.3),
    "momentum": Optimizer(name="sgd", lr=0.03, momentum=0.9, weight_decay=0.3),
    "lion": Optimizer(name="lion", lr=0.03, lion_betas=(0.8, 0.95), weight_decay=0.3),
}


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in SHAPES.items()}


def flat(values: dict[str, Tensor], run: tuple[str, ...]) -> Tensor:
    return torch.cat([values[name].flatten() for name in run])


def runs(config: Optimizer, values: dict[str, Tensor]) -> list[Run]:
    made = []
    for names in FLAT_RUNS:
        matrices = len(SHAPES[names[0]]) > 1
        params = flat(values, names)
        states = state_names(config, config.name)
        treatment = Treatment(config.name, 1.0 if matrices else 0.5, 0.3 if matrices else 0.0, states)
        grads = torch.zeros_like(params)
        made.append(Run(params, lambda grads=grads: grads, {n: torch.zeros_like(params) for n in states}, treatment))  # type: ignore[misc]
    return made


def set_gradients(given: list[Run], values: dict[str, Tensor]) -> None:
    for run, names in zip(given, FLAT_RUNS, strict=True):
        run.grads().copy_(flat(values, names))


def plain(config: Optimizer, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": 0.3, "share": 1.0},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0, "share": 0.5},
    ]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)
    if config.name == "lion":
        return textbook.Lion(groups, config.lr, config.lion_betas)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=False)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_flat_runs_are_updated_as_each_parameter_is_by_the_book(config: Optimizer, dtype: torch.dtype) -> None:
    """At every rate, and with gradients times every factor that clipping may ask for; vectors at half the rate."""
    given = runs(config, tensors(0, dtype))
    updater = Updater(config, given, World())
    parameters = {name: nn.Parameter(value) for name, value in tensors(0, dtype).items()}
    reference = plain(config, parameters)
    close = partial(torch.testing.assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for step, (rate, factor) in enumerate(zip(RATES, FACTORS, strict=True)):
        gradients = tensors(step + 1, dtype)
        set_gradients(given, gradients)
        assert updater.update(rate, factor) == pytest.approx(0.03 * rate)
        for group in reference.param_groups:
            group["lr"] = 0.03 * rate * group["share"]
        for name, parameter in parameters.items():
            parameter.grad = gradients[name] * factor
        reference.step()
        for run, names in zip(given, FLAT_RUNS, strict=True):
            close(run.params, flat({name: p.detach() for name, p in parameters.items()}, names))
    for run, names in zip(given, FLAT_RUNS, strict=True):
        for state, found in run.states.items():
            expected = flat({name: reference.state[p][state] for name, p in parameters.items()}, names)
            close(found, expected)


def test_each_optimizer_has_its_states() -> None:
    names = {name: state_names(config, config.name) for name, config in CONFIGS.items()}
    assert names == {
        "adamw": ("exp_avg", "exp_avg_sq"), "sgd": (), "momentum": ("momentum_buffer",), "lion": ("exp_avg",),
    }  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_states_that_are_copied_in_go_on_where_they_were(config: Optimizer) -> None:
    straight, first = runs(config, tensors(0)), runs(config, tensors(0))
    whole_way, before = Updater(config, straight, World()), Updater(config, first, World())
    for step in range(3):
        for given, updater in ((straight, whole_way), (first, before)):
            set_gradients(given, tensors(step + 1))
            updater.update(1.0)
    again = runs(config, tensors(99))
    after = Updater(config, again, World())
    after.set_steps(3)
    for old, new in zip(first, again, strict=True):
        new.params.copy_(old.params)
        for name, state in new.states.items():
            state.copy_(old.states[name])
    for given, updater in ((straight, whole_way), (again, after)):
        set_gradients(given, tensors(4))
        updater.update(1.0)
    assert all(torch.equal(one.params, other.params) for one, other in zip(straight, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", [CONFIGS["adamw"], CONFIGS["lion"]], ids=["adamw", "lion"])
def test_an_element_is_updated_alike_wherever_a_run_is_cut(config: Optimizer, dtype: torch.dtype) -> None:
    """Bit for bit, at odd lengths, where vector instructions end elsewhere."""
    generator = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(1003, generator=generator, dtype=dtype) for _ in range(4))
    found = []
    for cuts in ([1003], [1, 6, 500, 496], [997, 6]):
        states = state_names(config, config.name)
        given = []
        grads = torch.empty_like(values)
        for params, its in zip(values.clone().split(cuts), grads.split(cuts), strict=True):
            made = {name: torch.zeros_like(params) for name in states}
            given.append(Run(params, partial(its.view, -1), made, Treatment(config.name, 1.0, 0.3, states)))
        updater = Updater(config, given, World())
        for gradient in gradients:
            grads.copy_(gradient)
            updater.update(1.0, 0.3)
        found.append(torch.cat([run.params for run in given]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_muon_takes_its_matrices_and_leaves_the_rest_to_adamw() -> None:
    """Each as it would be by itself."""
    config = Optimizer(name="muon", lr=0.03, weight_decay=0.3)
    matrix = Treatment("muon", 2.0, 0.3, ("momentum_buffer",))
    vector = Treatment("adamw", 1.0, 0.0, ("exp_avg", "exp_avg_sq"))
    values = {"w": torch.randn(6, 4, dtype=torch.float64), "n": torch.randn(6, dtype=torch.float64)}
    grads = {name: torch.randn_like(value) for name, value in values.items()}
    given = []
    for name, treatment in (("w", matrix), ("n", vector)):
        params, its = values[name].clone().view(-1), grads[name].clone().view(-1)
        states = {state: torch.zeros_like(params) for state in treatment.states}
        piece = whole("w", (6, 4)).pieces[0] if treatment.by_matrix else None
        given.append(Run(params, partial(its.view, -1), states, treatment, piece))
    updater = Updater(config, given, World())
    assert updater.update(0.5) == 0.015
    w, n = (nn.Parameter(values[name]) for name in values)
    w.grad, n.grad = grads["w"], grads["n"]
    textbook.Muon([{"params": [w], "weight_decay": 0.3}], 0.03, config.muon_momentum).step()
    torch.optim.AdamW([n], lr=0.015, betas=config.betas, eps=config.eps, weight_decay=0).step()
    torch.testing.assert_close(given[0].params.view(6, 4), w.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(given[1].params, n.detach(), rtol=1e-12, atol=1e-12)


def test_without_parameters_there_is_nothing_to_update() -> None:
    for name in ("adamw", "lion", "muon"):
        updater = Updater(Optimizer(name=name, lr=0.5), [], World())
        updater.set_steps(3)
        assert updater.update(0.5) == 0.25
