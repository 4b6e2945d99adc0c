"""What a rank may hold on its device: the fraction that is taken away for it, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.comm.world import World
from shoal.config import Config, load
from shoal.errors import ConfigError
from shoal.layout import Layout
from shoal.meter import HOST, Meter
from shoal.train.budget import within_budget
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, make_model, open_data

RUN = Path(__file__).parents[2] / "runs" / "tiny.toml"
MIB = 2**20


def read(budget: float) -> Config:
    """With a budget in MiB."""
    sizes = ["model.hidden=256", "model.ffn=256", "model.layers=4", "data.seq_len=4", "data.batch=2"]
    return load(RUN, [*sizes, f"memory.budget_gib={budget / 1024}"])


def planned(world: World, line: str, budget: float) -> tuple[float, int]:
    """The fraction of the optimizer's states that is away, and the bytes at the peak of a step with it."""
    config, layout = read(budget), Layout.parse(line)
    found = within_budget(config, layout, world, open_data(config))
    assert replace(found, offload=()) == replace(layout, offload=())
    engine, source = make_engine(config, found, world), open_data(config)
    batch = source.batch(0, engine.mesh.coords["dp"], found.dp)
    with Meter(apart=[HOST]) as meter:
        engine.step(batch)
        meter.label("states", [tensor for flat in engine._sync.flats for tensor in flat.states.values()])
        meter.label(HOST, engine.on_host())
        with meter.phase("step"):
            engine.step(batch)
        return sum(part.fraction for part in found.offload), meter.peak("step")


@pytest.mark.parametrize(
    ("line", "states"),
    [
        ("dtype=bf16,offload=optimizer:cpu", 12),
        pytest.param("dp=2,zero=1,offload=optimizer:cpu", 4, marks=pytest.mark.parity),
    ],
)
def test_as_much_as_must_is_taken_away(line: str, states: int, pool: Pool) -> None:
    """With room for half of the ``states``, in bytes per parameter and rank: half. That step fits, and fills it."""
    layout = Layout.parse(line)
    said = set(pool.run(refused, line, ranks=layout.ranks))
    assert len(said) == 1
    needs = float(said.pop().split("; use ")[1].split()[0]) * 1024
    psi = sum(one.numel() for one in make_model(read(1), layout).parameters())
    budget = needs + states * psi / 2 / MIB
    for fraction, peak in pool.run(planned, line, budget, ranks=layout.ranks):
        assert fraction == pytest.approx(0.5, abs=0.15)  # the message tells what is needed in thousandths of a GiB
        assert 0.95 * budget * MIB < peak <= budget * MIB


def refused(world: World, line: str) -> str:
    config = read(1)
    with pytest.raises(ConfigError) as error:
        within_budget(config, Layout.parse(line), world, open_data(config))
    assert str(error.value).startswith("memory.budget_gib = 0.0009765625: a step takes ")
    assert "offload=params:cpu" in str(error.value)
    return str(error.value)


def test_without_a_budget_nothing_is_recorded() -> None:
    config = load(RUN)
    layout = Layout.parse("offload=optimizer:cpu")
    assert within_budget(config, layout, None, open_data(config)) is layout  # type: ignore[arg-type]
