"""Steps that update nothing, the scale of the loss, and what is copied into parameters between steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from engine_ranks import equal, weights
from precision_ranks import make, read, train
from torch import Tensor

from shoal.comm.world import World
from shoal.engine import Engine
from shoal.errors import Diverged
from shoal.layout import Layout
from shoal.optim.guard import INTERVAL, START, Guard
from shoal.train.pool import Pool


def test_the_scale_halves_when_it_was_too_large_and_grows_when_it_was_not() -> None:
    guard = Guard(0, scaled=True)
    for _ in range(3):
        assert not guard.passes(float("inf"))
    assert (guard.scale, guard.skipped, guard.exhausted) == (START / 8, 3, False)
    for _ in range(INTERVAL - 1):
        assert guard.passes(1.0)
    again = Guard(0, scaled=True)
    again.restore(guard.state())
    for one in (guard, again):
        assert one.scale == START / 8
        assert one.passes(1.0)
        assert one.scale == START / 4
    again.restore({})
    assert (again.scale, again.skipped) == (START, 0)


def test_what_no_scale_can_save_may_be_skipped_so_many_times_in_a_row() -> None:
    guard = Guard(2, scaled=True)
    while guard.scale > 1:
        guard.passes(float("nan"))
    assert [guard.passes(float("nan")) or guard.exhausted for _ in range(3)] == [False, False, True]
    plain = Guard(2, scaled=False)
    plain.restore(guard.state())
    assert (plain.scale, plain.exhausted) == (1.0, True)
    assert plain.passes(1.0)
    assert not plain.exhausted


def overflowing(world: World, line: str, folder: Path) -> tuple[list[bool], float, list[bool]]:
    """From a scale at which gradients overflow."""
    config = read("optimizer.skips=0")
    engine = make(world, config, line)
    engine._guard.scale = 2.0**40
    skipped = [one.skipped for one in train(engine, config, 32)]
    engine.save(folder)
    other = make(world, config, line)
    other.load(folder)
    assert other._guard.state() == engine._guard.state()
    return skipped, engine._guard.scale, [one.skipped for one in train(other, config, 1)]


@pytest.mark.parametrize("line", ["dp=2,zero=2,dtype=fp16", "dp=2,sync=server,dtype=fp16", "pp=2,mb=4,dtype=fp16"])
def test_a_scale_that_overflows_falls_on_all_ranks_alike(line: str, pool: Pool, tmp_path: Path) -> None:
    (first, *others) = pool.run(overflowing, line, tmp_path, ranks=2)
    skipped, value, after = first
    assert all(other == first for other in others)
    counted = Counter(skipped)
    assert 8 < counted[True] < 30
    assert skipped == sorted(skipped, reverse=True), "once it fits, it fits"
    assert value == 2.0 ** (40 - counted[True])
    assert after == [False]


def half_of_it_in_fp16(world: World, line: str) -> float:
    """The norm, of a module whose last layer is in float32."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4).half(), Widen(), torch.nn.Linear(4, 1))
    engine = Engine(module, Layout.parse(line), loss=lambda output, _: output.square().sum(), world=world)
    return engine.step({"inputs": torch.ones(2, 4).half()}).grad_norm


class Widen(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_the_scale_is_that_of_the_whole_model_on_every_stage(pool: Pool) -> None:
    (alone,) = pool.run(half_of_it_in_fp16, "dp=1", ranks=1)
    assert alone > 0.1
    assert pool.run(half_of_it_in_fp16, "pp=2", ranks=2) == pytest.approx([alone] * 2, rel=1e-3)


def test_a_skipped_step_leaves_buffers_as_they_were() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    engine = Engine(module, Layout(), loss=lambda output, _: output.sum())
    engine.step({"inputs": torch.randn(4, 2)})
    before = module[1].running_mean.clone()
    assert engine.step({"inputs": torch.full((4, 2), float("nan"))}).skipped
    assert torch.equal(module[1].running_mean, before)
    assert not engine.step({"inputs": torch.randn(4, 2)}).skipped
    before = module[1].running_mean.clone()
    poisoned = {"inputs": torch.full((4, 2), float("nan"))}
    for _ in range(engine.optimizer.skips):
        engine.step(poisoned)
    with pytest.raises(Diverged):
        engine.step(poisoned)
    assert torch.equal(module[1].running_mean, before)


@pytest.mark.parametrize("line", ["dp=1", "dp=2,zero=1"])
def test_what_is_copied_into_a_parameter_is_what_training_goes_on_from(line: str, pool: Pool) -> None:
    for dtype in ("float32", "bf16"):
        found = pool.run(copied_into, line, dtype, ranks=Layout.parse(line).ranks)
        assert found == [pytest.approx(5.0, abs=0.05)] * len(found)


def copied_into(world: World, line: str, dtype: str) -> float:
    config = read()
    engine = make(world, config, f"{line},dtype={dtype}")
    train(engine, config, 1)
    weight = engine.task.module.get_parameter("head.norm.weight")
    with torch.no_grad():
        weight.copy_(torch.full_like(weight, 5.0))
    train(engine, config, 1)
    return float(weight.detach().float().mean())


def test_what_is_written_back_unchanged_costs_no_master() -> None:
    """Weights that are clamped after each step, and loaded before a checkpoint is."""
    config = read("optimizer.lr=1e-3", "schedule.kind=constant", "schedule.warmup=0")
    plain, clamped = (make(World(), config, "dtype=bf16") for _ in range(2))
    for _ in range(12):
        train(plain, config, 1)
        train(clamped, config, 1)
        with torch.no_grad():
            for parameter in clamped.task.module.parameters():
                parameter.clamp_(-100, 100)
    assert equal(weights(plain), weights(clamped))


def test_what_is_copied_into_a_parameter_is_saved(tmp_path: Path) -> None:
    config = read()
    engine, other = (make(World(), config, "dtype=bf16") for _ in range(2))
    with torch.no_grad():
        for parameter in engine.task.module.parameters():
            parameter.fill_(0.5)
    other.load(engine.save(tmp_path))
    assert all((one.values == 0.5).all() for one in weights(other))


def test_a_scale_of_one_stays_one_when_a_run_goes_on() -> None:
    guard, again = Guard(0, scaled=True), Guard(0, scaled=True)
    while guard.scale > 1:
        guard.passes(float("inf"))
    again.restore(guard.state())
    assert again.scale == 1.0


def test_a_weight_that_is_not_finite_skips_the_step() -> None:
    module = torch.nn.Linear(2, 1)
    before = module.weight.detach().clone()
    options = {"loss": lambda output, _: output.sum(), "weight": lambda batch: torch.tensor(float("inf"))}
    engine = Engine(module, Layout(), **options)
    assert engine.step({"inputs": torch.ones(2, 2)}).skipped
    assert torch.equal(module.weight, before)


def quantised(world: World, line: str) -> list[float]:
    """A module with frozen whole numbers and a frozen float8 table."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    module[0].register_parameter("scales", torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False))
    table = torch.ones(3).to(torch.float8_e4m3fn)
    module[1].register_parameter("table", torch.nn.Parameter(table, requires_grad=False))
    engine = Engine(module, Layout.parse(line), loss=lambda output, _: output.sum(), world=world)
    return [engine.step({"inputs": torch.ones(2, 4)}).loss for _ in range(2)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_parameters_may_be_of_any_dtype(zero: int, pool: Pool) -> None:
    (alone,) = pool.run(quantised, "dp=1", ranks=1)
    assert pool.run(quantised, f"dp=2,zero={zero}", ranks=2) == [pytest.approx(alone)] * 2
