"""A checkpoint of a model with experts goes on under any other layout: weights, momenta of single experts, and the bias
of gates."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from test_expert_parity import read

from shoal.comm.world import World
from shoal.config import Config
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data

pytestmark = pytest.mark.parity

LAYOUTS = (
    "dp=1",
    "dp=2,tp=2,ep=2,etp=2,zero=3",
    "tp=4:2d,ep=4",
    "cp=2,pp=2,ep=2,mb=2,zero=1",
    "dp=4,ep=4,zero=2",
    "cp=2:ulysses,tp=2:1d-sp,ep=2,offload=optimizer:cpu",
    "dp=2,tp=2,etp=4,zero=1",
    "dp=1",
)
MODELS = {
    "a bias, and Muon": ('model.gate="sigmoid"', "model.bias_rate=0.05", "optimizer.name=muon"),
    "capacity": ("model.capacity=0.9",),
    "latent attention, and Lion": (
        "optimizer.name=lion",
        "model.kv_heads=4",
        "model.latent={rank=7, query_rank=9, plain_dim=3, turned_dim=4, value_dim=6}",
    ),
}
HALF, WHOLE = 3, 6


def course(
    world: World, config: Config, line: str, start: Path | None, until: int, folder: Path
) -> tuple[list[float], Path]:
    """Losses and norms from the checkpoint ``start``, or the beginning, to step ``until``, and the checkpoint there."""
    engine, source = make_engine(config, Layout.parse(f"{line},dtype=float64"), world), open_data(config)
    if start is not None:
        engine.load(start)
    found = []
    for step in range(engine.steps_done, until):
        result = engine.step(source.batch(step, engine.mesh.coords["dp"], engine.layout.dp))
        assert result is not None
        found += [result.loss, result.grad_norm]
    return found, engine.save(folder)


@pytest.mark.parametrize("model", MODELS)
def test_training_goes_on_from_layout_to_layout(model: str, eight: Pool, tmp_path: Path) -> None:
    config = read(*MODELS[model])

    def run(line: str, start: Path | None, until: int, name: str) -> tuple[list[float], Path]:
        return eight.run(course, config, line, start, until, tmp_path / name, ranks=Layout.parse(line).ranks)[0]

    alone, _ = run("dp=1", None, WHOLE, "alone")
    for number, (one, other) in enumerate(pairwise(LAYOUTS)):
        before, saved = run(one, None, HALF, f"{number} first")
        after, _ = run(other, saved, WHOLE, f"{number} then")
        assert [*before, *after] == pytest.approx(alone, rel=1e-9), f"{one} → {other}"
