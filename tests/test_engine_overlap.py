"""Parameters that ZeRO-1 and 2 gather under the next forward pass, as an engine shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_ranks import Held, equal, weights

from shoal.comm.world import World
from shoal.config import load
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data

RUN = Path(__file__).parents[1] / "runs" / "tiny6.toml"


def trained(world: World, line: str, overlap: bool, folder: Path) -> tuple[list[float], list[Held], list[bool]]:
    """The losses of a few steps and of what an evaluation and a checkpoint in their middle lead to, this rank's
    weights, and whether the module's parameters were all there after the first step, after it was drained, after an
    evaluation and after a checkpoint."""
    config = load(RUN, ["model.layers=3", "data.seq_len=6", "data.batch=12", "optimizer.clip=0.1"])
    engine = make_engine(config, Layout.parse(line), world)
    assert not engine.overlap, "whoever makes an engine may read parameters between steps"
    engine.overlap = overlap
    source, losses, whole = open_data(config), [], []

    def step() -> None:
        result = engine.step(source.batch(engine.steps_done, engine.mesh.coords["dp"], engine.layout.dp))
        assert result is not None
        losses.append(result.loss)

    def look() -> None:
        whole.append(not any(one.isnan().any() for one in engine.task.module.parameters()))

    step()
    look()
    engine.drain()
    look()
    step()
    losses.append(engine.evaluate(source.batch(7, engine.mesh.coords["dp"], engine.layout.dp))[0])
    look()
    step()
    path = engine.save(folder)
    look()
    step()
    engine.load(path)
    step()
    with torch.no_grad():
        engine.drain()
        for one in engine.task.module.parameters():
            one.mul_(0.5)  # which training goes on from
    step()
    step()
    return losses, weights(engine), whole


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("dp=2,zero=1", 2),
        ("dp=2,zero=2,mb=3,dtype=bf16", 2),
        pytest.param("dp=2,pp=2:interleaved,zero=1,mb=2,recompute=full,dtype=float64", 4, marks=pytest.mark.parity),
    ],
)
def test_steps_are_the_same_and_what_is_on_its_way_shows(line: str, ranks: int, tmp_path: Path, pool: Pool) -> None:
    early, late = (pool.run(trained, line, overlap, tmp_path / str(overlap), ranks=ranks) for overlap in (False, True))
    for (losses, held, whole), (others, other_held, other_whole) in zip(early, late, strict=True):
        assert losses == others
        assert equal(held, other_held)
        assert whole == [True] * 4
        assert other_whole == [False, True, True, True]
