"""Engines with parameter servers: results and words, and steps that run ahead of updates."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import Held, equal, held, put_together, weights
from precision_ranks import make, read, train

from shoal.checkpoint import read_manifest
from shoal.comm.world import World
from shoal.config import Config, Optimizer
from shoal.engine import Engine, StepResult
from shoal.errors import ConfigError, Diverged
from shoal.layout import Layout
from shoal.local import LocalParameter
from shoal.train.pool import Pool
from shoal.train.served import ServedTrainer
from shoal.train.setup import learning_rate, make_model, materialise_alone, open_data

SGD = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9")
STEPS, DRAINED = 6, 3


def exact(*settings: str) -> Config:
    return read("data.seq_len=7", "data.batch=12", "optimizer.clip=0.1", *settings)


def oracle(config: Config, line: str) -> tuple[ServedTrainer, list[LocalParameter]]:
    layout = Layout.parse(f"{line},dtype=float64")
    model = make_model(config, layout)
    parameters = materialise_alone(model, config.run.seed)
    common = model, config.optimizer, learning_rate(config), config.run.seed
    return ServedTrainer(*common, layout.stale, layout.reduce, layout.dp), parameters


# ---- what is computed


def course(world: World, config: Config, line: str) -> tuple[list[StepResult], list[Held]]:
    """Results of some steps, which are drained in the middle, and the weights after that."""
    engine = make(world, config, f"{line},dtype=float64")
    results = []
    for number in range(STEPS):
        train(engine, config, 1)
        if number == DRAINED - 1:
            engine.drain()
        results += engine.finished()
    engine.drain()
    if engine.layout.stale:
        results += engine.finished()
    return results, weights(engine)


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("dp=3,sync=server/2{stale=2},mb=2", True),
        ("dp=2,sync=server{stale=1}", False),
        *(
            pytest.param(line, share, marks=pytest.mark.parity)
            for line in ("dp=4,sync=server/3{stale=1;reduce=max}", "dp=3,sync=server{reduce=sum}", "dp=4,sync=server/2")
            for share in (True, False)
        ),
    ],
)
def test_steps_are_those_of_the_recurrence_over_whatever_carries_them(line: str, share: bool, pool: Pool) -> None:
    """Loss, norm, weights and ages; a drain begins anew. All ranks are told the same."""
    config, stale = exact(*SGD), Layout.parse(line).stale
    truth, parameters = oracle(config, line)
    expected = []
    for number in range(STEPS):
        expected.append(truth.step(open_data(config).batch(number)))
        if number == DRAINED - 1:
            truth.drain()
    found = pool.run(course, config, line, ranks=Layout.parse(line).ranks, share=share)
    for results, _ in found:
        assert [one.step for one in results] == list(range(1, STEPS + 1))
        assert [one.age for one in results] == 2 * [min(number, stale) for number in range(DRAINED)]
        assert [one.loss for one in results] == pytest.approx([one.loss for one in expected], rel=1e-12)
        assert [one.grad_norm for one in results] == pytest.approx([one.grad_norm for one in expected], rel=1e-12)
        assert min(one.grad_norm for one in results) > 0.1, "clipping acts"
        assert results == found[0][0]
    alone = (part for one in parameters for part in one.fragments("weight", one.parameter))
    full, true = put_together(each for _, each in found), put_together([held(alone, "weight")])
    torch.testing.assert_close(full, true, rtol=1e-12, atol=1e-13)


def returned(world: World, line: str) -> list[int | None]:
    config = exact()
    return [one and one.step for one in train(make(world, config, f"{line},dtype=float64"), config, 4)]


@pytest.mark.parametrize("stale", [0, 1, 2])
def test_a_result_comes_when_its_gradients_have_been_applied(stale: int, pool: Pool) -> None:
    expected = [None if number < stale else number + 1 - stale for number in range(4)]
    assert pool.run(returned, f"dp=2,sync=server{{stale={stale}}}", ranks=2) == [expected] * 2


# ---- who waits for whom

LATER = ((2, True), (1, False))


def ahead(world: World, line: str, folder: Path) -> int:
    """The last rank begins when the others have ended as many steps as they may be ahead of it; or never, if they
    wait for it before."""
    config = exact()
    engine = make(world, config, f"{line},dtype=float64")
    stale = engine.layout.stale
    if world.rank == world.size - 1:
        deadline = time.monotonic() + 20
        while not all((folder / f"ahead-{rank}").exists() for rank in range(world.size - 1)):
            assert time.monotonic() < deadline, "the others wait for a rank that has not begun"
            time.sleep(0.01)
    train(engine, config, stale)
    (folder / f"ahead-{world.rank}").touch()
    train(engine, config, 3)
    engine.drain()
    return engine.finished()[-1].step


@pytest.mark.parametrize(
    ("stale", "share"), [(1, True), (2, False), *(pytest.param(*one, marks=pytest.mark.parity) for one in LATER)]
)
def test_ranks_may_be_so_many_steps_ahead_of_one_that_has_not_begun(
    stale: int, share: bool, pool: Pool, tmp_path: Path
) -> None:
    line = f"dp=3,sync=server{{stale={stale}}}"
    assert pool.run(ahead, line, tmp_path, ranks=3, share=share, timeout_s=60) == [stale + 3] * 3


# ---- what ends and what goes on


def resumed(world: World, line: str, folder: Path) -> tuple[bool, int, set[str], list[Held], list[Held]]:
    """Whether a run that goes on from a checkpoint is the unbroken one; updates and kinds of tensors in that; the
    weights that were saved, and those of another layout that loads them."""
    config = exact()
    engine, other = (make(world, config, line) for _ in range(2))
    train(engine, config, 4)
    path = engine.save(folder)
    saved = weights(engine)
    other.load(path)
    whole = make(world, config, f"dp={world.size},dtype=float64")
    whole.load(path)
    for one in (engine, other):
        train(one, config, 4)
        one.drain()
    manifest = read_manifest(path)
    kept: Any = manifest.meta["engine"]
    alike = equal(weights(engine), weights(other))
    return alike, kept["updates"], set(manifest.tensors), saved, weights(whole)


@pytest.mark.parametrize(
    "line",
    [
        "dp=2,sync=server{stale=1},dtype=bf16",
        pytest.param("dp=3,sync=server/2,dtype=float64", marks=pytest.mark.parity),
        pytest.param("dp=3,sync=server/2{stale=2},dtype=float64", marks=pytest.mark.parity),
    ],
)
def test_a_checkpoint_has_everything_that_was_under_way(line: str, pool: Pool, tmp_path: Path) -> None:
    found = pool.run(resumed, line, tmp_path, ranks=Layout.parse(line).ranks)
    for alike, updates, kinds, *_ in found:
        assert alike
        assert updates == 4
        assert kinds == {"weight", "exp_avg", "exp_avg_sq"}
    saved, loaded = (put_together(each[place] for each in found) for place in (3, 4))
    assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.items())


def poisoned(world: World) -> tuple[list[tuple[int, bool, float]], bool, str]:
    """Steps, of which the second has a gradient on the last rank that is not finite; whether the others are those of a
    run without it; what ends a run of such steps."""
    plain = Optimizer(name="sgd", lr=0.5, weight_decay=0.0, clip=0, skips=1)

    def engine() -> Engine:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).double()
        line = Layout.parse("dp=2,sync=server{stale=1}")
        return Engine(model, line, optimizer=plain, loss=lambda output, _: output.square().sum(), world=world)

    def step(one: Engine, value: float) -> None:
        here = value if world.rank == 1 else 0.5
        one.step({"inputs": torch.full((2, 2), here, dtype=torch.float64)})

    spoiled, sound = engine(), engine()
    for value in (1.0, float("inf"), 0.25):
        step(spoiled, value)
        if value != float("inf"):
            spoiled.drain()
    for value in (1.0, 0.25):
        step(sound, value)
        sound.drain()
    told = [(one.step, one.skipped, one.lr) for one in spoiled.finished()]
    alike = equal(weights(spoiled), weights(sound))
    for _ in range(2):  # of which one has been applied, and no more than one may be in a row
        step(spoiled, float("nan"))
    with pytest.raises(Diverged) as caught:
        step(spoiled, float("nan"))
    return told, alike, str(caught.value)


def test_a_gradient_that_is_not_finite_is_skipped_by_all(pool: Pool) -> None:
    for told, alike, text in pool.run(poisoned, ranks=2):
        assert told == [(1, False, 0.5), (2, True, 0.0), (3, False, 0.5)]
        assert alike
        assert "the gradient norm is nan" in text


def in_half(world: World, line: str) -> tuple[list[float], int]:
    config = read("optimizer.lr=1e-3", "schedule.kind=constant", "schedule.warmup=0", "optimizer.clip=0.5")
    engine = make(world, config, line)
    train(engine, config, 8)
    engine.drain()
    return [one.loss for one in engine.finished()], engine.skipped


@pytest.mark.parametrize(
    "dtype", ["fp16", *(pytest.param(one, marks=pytest.mark.parity) for one in ("bf16", "bf16{grads=bf16}"))]
)
def test_half_precision_stays_near_float32(dtype: str, pool: Pool) -> None:
    line = "dp=2,sync=server{stale=1},dtype="
    ((truth, _), _) = pool.run(in_half, f"{line}float32", ranks=2)
    for losses, skipped in pool.run(in_half, f"{line}{dtype}", ranks=2):
        assert skipped == 0
        assert losses == pytest.approx(truth, rel=5e-3)


# ---- between steps


def between(world: World) -> tuple[str, float]:
    """What is said to a write while parameters are on their way; and what has become of one after a drain."""
    config = exact()
    engine = make(world, config, "dp=2,sync=server,dtype=float64")
    engine.overlap = True
    weight = engine.task.module.get_parameter("head.norm.weight")
    said = ""
    train(engine, config, 1)
    engine.drain()
    with torch.no_grad():
        weight.fill_(5.0)
    train(engine, config, 1)
    engine.drain()
    after = weight.mean().item()
    train(engine, config, 1)
    if world.rank == 1:
        with torch.no_grad():
            weight.fill_(5.0)
        try:
            engine.drain()
        except ConfigError as error:
            said = str(error)
    else:
        engine.drain()
    return said, after


def test_parameters_may_be_written_to_after_a_drain(pool: Pool) -> None:
    (server, here), (other, there) = pool.run(between, ranks=2)
    assert here == there
    assert here == pytest.approx(5.0, abs=0.05)
    assert server == ""
    assert "call engine.drain() before writing" in other
