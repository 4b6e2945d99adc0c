"""Training with ZeRO's int8 blocks: what is exact stays exact, what is rounded is rounded alike everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_ranks import Held, held, put_together, weights

from shoal.comm import blocks, quantised
from shoal.comm.world import World
from shoal.config import Config, load
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data

RUN = Path(__file__).parents[1] / "runs" / "tiny6.toml"


def read(*more: str) -> Config:
    return load(RUN, ["model.layers=3", "data.seq_len=6", "data.batch=12", "optimizer.clip=0.1", *more])


def step(engine: Engine, config: Config) -> float:
    dp = engine.mesh.coords["dp"]
    result = engine.step(open_data(config).batch(engine.steps_done, dp, engine.layout.dp))
    return result.loss if result else 0.0


def trained(world: World, config: Config, line: str, steps: int) -> tuple[list[float], list[Held], list[Held]]:
    """Losses, this rank's weights, and the gradients of the first step, where steps do not overlap."""
    engine, gradients = make_engine(config, Layout.parse(line), world), []
    engine.on_gradients = lambda: gradients.append(held(engine.gradients(), "gradient"))
    losses = []
    for _ in range(steps):
        step(engine, config)
        losses += [result.loss for result in engine.finished()]
    engine.drain()
    return losses, weights(engine), gradients[0] if gradients else []


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("dp=2,zero=1{gather=int8;reduce=int8},dtype=float64", 2),
        ("dp=3,zero=3{gather=int8;reduce=int8},mb=2", 3),
        ("dp=4,zero=2/2{reduce=int8},dtype=bf16", 4),
        pytest.param("dp=4,zero=3/2{gather=int8;reduce=int8;keep=step},mb=3", 4, marks=pytest.mark.parity),
        pytest.param("dp=2,pp=2,zero=3{gather=int8;reduce=int8},mb=2", 4, marks=pytest.mark.parity),
        pytest.param("dp=2,tp=2:1d-sp,zero=1{gather=int8;reduce=int8}", 4, marks=pytest.mark.parity),
        pytest.param("dp=2,pp=2:2bw,zero=1{gather=int8;reduce=int8},mb=2", 4, marks=pytest.mark.parity),
    ],
)
def test_rounding_is_small_and_the_same_wherever_a_tensor_is_held(line: str, ranks: int, pool: Pool) -> None:
    """Copies agree in every bit. The first step's gradients are off by a few per cent, and the loss after ten by less
    than one."""
    exact = line[: line.index("{")] + line[line.index("}") + 1 :]
    found = pool.run(trained, read(), line, 10, ranks=ranks)
    truth = pool.run(trained, read(), exact, 10, ranks=ranks)
    put_together(ours for _, ours, _ in found)
    ours, theirs = (put_together(gradients for _, _, gradients in by_rank) for by_rank in (found, truth))
    assert ours.keys() == theirs.keys()
    if theirs:
        off, norm = (
            torch.cat([one.flatten() for one in each]).norm()
            for each in ([ours[name] - theirs[name] for name in theirs], theirs.values())
        )
        assert 0 < off / norm < 0.04
    for (losses, _, _), (others, _, _) in zip(found, truth, strict=True):
        assert losses != others
        assert losses == pytest.approx(others, rel=0.01)


def going_on(world: World, line: str, folder: Path) -> tuple[list[Held], list[float], list[float], float]:
    """Weights as they are drawn, the losses of two ways of going on from a checkpoint, and by how much of the largest
    the parameters that stay whole differ from the weights after a step."""
    config = read()
    engine = make_engine(config, Layout.parse(line), world)
    before = weights(engine)
    step(engine, config)
    path = engine.save(folder)
    kept = [flat for flat in engine._sync.flats if flat.keep_params]
    off = max((float((one.own_params - one.masters).abs().max() / one.masters.abs().max()) for one in kept), default=0)
    onward = [step(engine, config) for _ in range(2)]
    engine.load(path)
    return before, onward, [step(engine, config) for _ in range(2)], off


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_are_exact_and_only_what_computes_with_them_is_rounded(zero: int, tmp_path: Path, pool: Pool) -> None:
    """They are drawn as ever, and a checkpoint has them as they are."""
    lines = f"dp=2,zero={zero}", f"dp=2,zero={zero}{{gather=int8}}"
    exact, rounded = (pool.run(going_on, line, tmp_path / str(len(line)), ranks=2) for line in lines)
    truth, ours = (put_together(before for before, *_ in found) for found in (exact, rounded))
    assert truth.keys() == ours.keys()
    assert all(torch.equal(truth[name], ours[name]) for name in truth)
    for (_, onward, again, off), (_, others, _, none) in zip(rounded, exact, strict=True):
        assert onward == again != others
        assert (none, off > 0) == (0, zero == 1)
        assert off <= 1 / 254


def spoiled(x: torch.Tensor, packed: torch.Tensor) -> None:
    """What is sent is not finite in one place."""
    x = x.clone()
    x[len(x) // 2] = float("inf")
    blocks.pack(x, packed)


def not_finite(world: World, line: str) -> tuple[list[bool], bool]:
    """Whether steps were skipped, of which the second has a gradient that is not finite; and whether weights are."""
    config = read("optimizer.skips=2")
    engine = make_engine(config, Layout.parse(line), world)
    skipped = []
    for number in range(3):
        with pytest.MonkeyPatch.context() as patch:
            if number == 1 and world.rank == 1:
                patch.setattr(quantised, "pack", spoiled)
            step(engine, config)
        skipped.append(engine.finished()[-1].skipped)
    return skipped, all(torch.as_tensor(one.values).isfinite().all() for one in weights(engine))


@pytest.mark.parametrize("line", ["dp=2,zero=1{reduce=int8}", "dp=2,zero=3{gather=int8;reduce=int8}"])
def test_a_gradient_that_is_not_finite_is_known_for_one(line: str, pool: Pool) -> None:
    assert pool.run(not_finite, line, ranks=2) == [([False, True, False], True)] * 2
