"""Half precision trains as float32 does: the default model, 200 steps, the same validation loss to a hundredth."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.comm.world import World
from shoal.config import Config, load
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.prepare import prepare_data
from shoal.train.setup import make_engine, open_data

ROOT = Path(__file__).parents[2]
STEPS = 200


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("kjv")
    settings = {"run.steps": STEPS, "data.text": f"{ROOT}/data/kjv.txt", "data.path": f"{folder}/kjv.store"}
    config = load(ROOT / "runs" / "quickstart.toml", [f"{key}={value}" for key, value in settings.items()])
    prepare_data(config, lambda what, done, total: None)
    return config


def validation_loss(world: World, config: Config, line: str) -> tuple[float, int]:
    """After all steps, over the first batches of the validation split; and how many steps were skipped."""
    engine = make_engine(config, Layout.parse(line), world)
    part, parts = engine.mesh.coords["dp"], engine.layout.dp
    train, validation = open_data(config), open_data(config, "validation")
    for step in range(STEPS):
        engine.step(train.batch(step, part, parts))
    summed = [engine.evaluate(validation.batch(step, part, parts)) for step in range(8)]
    return sum(loss for loss, _ in summed) / sum(weight for _, weight in summed), engine.skipped


@pytest.fixture(scope="module")
def exact(config: Config, pool: Pool) -> float:
    return pool.run(validation_loss, config, "dp=2", ranks=2)[0][0]  # type: ignore[no-any-return]


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("line", ["dp=1", "dp=2,zero=3", "tp=2:1d-sp", "pp=2,mb=4"])
def test_half_precision_reaches_the_validation_loss_of_float32(
    line: str, dtype: str, config: Config, pool: Pool, exact: float
) -> None:
    ((loss, skipped), *_) = pool.run(validation_loss, config, f"{line},dtype={dtype}", ranks=Layout.parse(line).ranks)
    assert loss == pytest.approx(exact, rel=0.01)
    assert skipped <= (5 if dtype == "fp16" else 0)
