"""Asynchronous pipelines beside what else an engine does: a user's writes, checkpoints, memory, what waits for what."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import equal, weights
from precision_ranks import make, read, train
from torch import Tensor, nn

from shoal.checkpoint import read_manifest
from shoal.comm.collectives import barrier
from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.engine import Engine
from shoal.errors import ConfigError
from shoal.layout import Layout
from shoal.train.pool import Pool

SCHEDULES = ("2bw", "pipedream", "pipedream-vertical")


class Layer(nn.Linear):
    """Whose gradients of micro-batch number ``poisoned`` are not finite: those of later layers are, as where one has
    overflowed."""

    calls, poisoned = 0, -1

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.calls == self.poisoned:
            y.register_hook(lambda gradient: gradient * math.nan)
        self.calls += 1
        return y


class Net(nn.Sequential):
    """Two layers, one a stage."""

    def __init__(self, poisoned: int = -1) -> None:
        torch.manual_seed(0)
        super().__init__(Layer(3, 3), nn.Linear(3, 1))
        self[0].poisoned = poisoned
        self.double()


def engine_of(world: World, line: str, poisoned: int = -1) -> Engine:
    return Engine(
        Net(poisoned),
        Layout.parse(line),
        optimizer=Optimizer(lr=0.1),
        loss=lambda y, _: y.square().sum(),
        world=world,
    )


def batch(engine: Engine, number: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"inputs": torch.randn(2 * engine.layout.mb, 3, generator=generator, dtype=torch.float64)}


def own(engine: Engine) -> nn.Parameter:
    """A weight that this rank has, as a user finds it."""
    return next(one for one in engine.task.module.parameters() if not one.is_meta and one.ndim == 2)


# ---- what a user does to parameters between steps


def written_to(world: World, line: str, folder: Path) -> tuple[float, float, bool]:
    """A weight after a write while nothing is under way, after two more steps, and whether a checkpoint has a write."""
    engine = engine_of(world, line)
    for number in range(4):
        engine.step(batch(engine, number))
    engine.drain()
    with torch.no_grad():
        own(engine).fill_(5.0)
    before = own(engine).detach().mean().item()
    for number in range(2):
        engine.step(batch(engine, number))
    engine.drain()
    after = own(engine).detach().mean().item()
    with torch.no_grad():
        own(engine).fill_(7.0)
    path = engine.save(folder)
    other = engine_of(world, line)
    other.load(path)
    return before, after, bool((own(other) == 7).all())


@pytest.mark.parametrize("line", ["pp=2:2bw,mb=2", "dp=2,zero=1,pp=2:pipedream-vertical,mb=2"])
def test_what_is_written_to_a_parameter_after_a_drain_is_what_training_goes_on_from(
    line: str, pool: Pool, tmp_path: Path
) -> None:
    for before, after, saved in pool.run(written_to, line, tmp_path, ranks=Layout.parse(line).ranks):
        assert before == 5
        assert 4 < after < 5, "a few steps of AdamW away"
        assert saved


def spoil(engine: Engine, what: str) -> None:
    """What a user may do to a weight."""
    weight = own(engine)
    if what == "written to":
        with torch.no_grad():
            weight.mul_(2)
    elif what == "frozen":
        weight.requires_grad_(False)
    else:
        weight.data = weight.detach().clone()


def spoiled(world: World, line: str, what: str, then: str) -> str:
    """What the engine says to it while steps are under way."""
    engine = engine_of(world, line)
    for number in range(3):
        engine.step(batch(engine, number))
    barrier(world.everyone)  # for who is found out leaves at once
    spoil(engine, what)
    try:
        if then == "step":
            engine.step(batch(engine))
        else:
            engine.drain()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("then", ["step", "drain"])
@pytest.mark.parametrize("what", ["written to", "frozen", "given other memory"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_done_to_a_parameter_while_steps_are_under_way_is_an_error(
    schedule: str, what: str, then: str, pool: Pool
) -> None:
    found = pool.run(spoiled, f"pp=2:{schedule},mb=2", what, then, ranks=2)
    for stage, told in enumerate(found):
        assert told.startswith(f"Engine: {stage}.weight"), told
        assert f"was {what}" in told
        assert what != "written to" or "call engine.drain() before writing" in told


# ---- updates that one stage has skipped


def resumed(world: World, line: str, folder: Path, poisoned: int = -1) -> tuple[Any, bool, list[Any]]:
    """The updates that a checkpoint tells of, whether a run that goes on from it is the unbroken one, and its steps."""
    engine, other = engine_of(world, line, poisoned), engine_of(world, line)
    for number in range(4):
        engine.step(batch(engine, number))
    path = engine.save(folder)
    told = [(one.step, one.skipped, one.micro_batches) for one in engine.finished()]
    other.load(path)
    kept: Any = read_manifest(path).meta["engine"]
    for number in range(4, 8):
        for one in (engine, other):
            one.step(batch(one, number))
    for one in (engine, other):
        one.drain()
    same = equal(weights(engine), weights(other)) and [one.loss for one in engine.finished()] == [
        one.loss for one in other.finished()
    ]
    return kept["updates"], same, told


@pytest.mark.parametrize("line", ["pp=2:pipedream,mb=2", "dp=2,zero=1,pp=2:pipedream-vertical,mb=2"])
def test_a_run_goes_on_with_as_many_updates_as_each_stage_has_made(line: str, pool: Pool, tmp_path: Path) -> None:
    """AdamW's bias correction counts them. A drain brings all stages to the same number, unless one skipped some."""
    ranks = Layout.parse(line).ranks
    for updates, same, told in pool.run(resumed, line, tmp_path / "plain", ranks=ranks):
        assert updates == 8
        assert same
        assert not any(skipped for _, skipped, _ in told)
    for updates, same, told in pool.run(resumed, line, tmp_path / "poisoned", 3, ranks=ranks):
        assert updates == [7, 8], "by layer"
        assert same
        assert [(step, which) for step, skipped, which in told if skipped] == [(2, (1,))]


def loaded_elsewhere(world: World, folder: Path) -> int:
    engine = engine_of(world, "pp=1")
    engine.load(next(folder.glob("step-*")))
    return engine._updater.updates


def test_what_stages_have_made_by_themselves_counts_once_where_there_is_one(pool: Pool, tmp_path: Path) -> None:
    pool.run(resumed, "pp=2:pipedream,mb=2", tmp_path, 3, ranks=2)
    assert pool.run(loaded_elsewhere, tmp_path, ranks=1) == [8]


# ---- memory, and what waits


def test_stochastic_rounding_has_no_float32_copies_beside_versions() -> None:
    """And without delay rounds as it does without versions."""
    config = read("optimizer.rounding=stochastic", "data.batch=4")
    plain, alone = (make(World(), config, f"{line},dtype=bf16") for line in ("pp=1", "pp=1:pipedream"))
    for engine in (plain, alone):
        train(engine, config, 4)
        engine.drain()
    assert {flat.masters.dtype for flat in alone._sync.flats} == {torch.bfloat16}
    assert all(flat.masters is not flat.own_params for flat in alone._sync.flats)
    assert equal(weights(plain), weights(alone))


def scattering(world: World) -> list[tuple[bool, bool]]:
    """Of each batch: whether its reduce-scatter is under way after the reduction, and after the norm."""
    engine = engine_of(world, "dp=2,zero=1,pp=2:2bw,mb=3")
    flow, sync = engine._flow, engine._sync
    assert flow is not None
    reduce, norm = flow.reduce, flow.norm
    found: list[tuple[bool, bool]] = []
    after = False

    def reducing(units: Iterable[int], first: int) -> None:
        nonlocal after
        reduce(units, first)
        after = bool(sync._scattering)  # type: ignore[attr-defined]

    def norming(first: int) -> None:
        norm(first)
        found.append((after, bool(sync._scattering)))  # type: ignore[attr-defined]

    flow.reduce, flow.norm = reducing, norming  # type: ignore[method-assign]
    for number in range(5):
        engine.step(batch(engine, number))
    engine.drain()
    return found


def test_a_batch_is_summed_while_the_next_one_is_computed(pool: Pool) -> None:
    """Nothing waits for the sums of ZeRO before the norm is asked for."""
    for found in pool.run(scattering, ranks=4):
        assert found == [(True, False)] * 5
