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
from shoal.train import budget
from shoal.train.budget import within_budget
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, make_model, open_data

RUN = Path(__file__).parents[2] / "runs" / "tiny.toml"
MIB = 2**20


def read(room: float) -> Config:
    """With a budget in MiB."""
    sizes = ["model.hidden=256", "model.ffn=256", "model.layers=4", "data.seq_len=4", "data.batch=2"]
    return load(RUN, [*sizes, f"memory.budget_gib={room / 1024}"])


def planned(world: World, line: str, room: float) -> tuple[float, int]:
    """The fraction of the optimizer's states that is away, and the bytes at the peak of a step with it."""
    config, layout = read(room), Layout.parse(line)
    found, foreseen = within_budget(config, layout, world, open_data(config))
    assert replace(found, offload=()) == replace(layout, offload=())
    engine, source = make_engine(config, found, world), open_data(config)
    batch = source.batch(0, engine.mesh.coords["dp"], found.dp)
    with Meter(apart=[HOST]) as meter:
        engine.step(batch)
        meter.label("states", [tensor for flat in engine._sync.flats for tensor in flat.states.values()])
        meter.label(HOST, engine.on_host())
        with meter.phase("step"):
            engine.step(batch)
        peak = meter.peak("step")
        assert foreseen == pytest.approx(peak, rel=0.02)
        return sum(part.fraction for part in found.offload), peak


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
    room = needs + states * psi / 2 / MIB
    for fraction, peak in pool.run(planned, line, room, ranks=layout.ranks):
        assert fraction == pytest.approx(0.5, abs=0.15)  # the message tells what is needed in thousandths of a GiB
        assert 0.95 * room * MIB < peak <= room * MIB


def refused(world: World, line: str) -> str:
    """What is said of a budget of 1 MiB, when nothing else is tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "_LESS", ())
        said, notes = told(world, line, 1)
    assert said.startswith("memory.budget_gib = 0.0009765625: a step takes ")
    assert not notes
    return said


def told(world: World, line: str, room: float) -> tuple[str, list[str]]:
    config = read(room)
    with pytest.raises(ConfigError) as error:
        within_budget(config, Layout.parse(line), world, open_data(config))
    return str(error.value), getattr(error.value, "__notes__", [])


@pytest.mark.parametrize("room", [0.5, pytest.param(6.0, marks=pytest.mark.parity)])
def test_what_fits_is_found_in_order_and_does_fit(room: float, pool: Pool) -> None:
    """In ``room`` MiB less than a step takes."""
    needs = float(pool.run(refused, "dp=2", ranks=2)[0].split("a step takes ")[1].split(" MiB")[0])
    (said, notes), other = pool.run(told, "dp=2", needs - room, ranks=2)
    assert (said, notes) == other, "the same on every rank"
    _, *lines = notes[0].splitlines()
    took = [float(line.split(" MiB")[0].split()[-1]) for line in lines]
    assert [line.split()[0] for line in lines] == ["zero=2", "recompute=full", "zero=3"][: len(lines)]
    assert took == sorted(took, reverse=True)
    assert ["fits" in line for line in lines] == [False] * (len(lines) - 1) + [True]
    fits = Layout.parse(said.split("--layout ")[1])
    assert str(fits).startswith("dp=2,zero=")
    for _, peak in pool.run(planned, str(fits), needs - room, ranks=2):
        assert peak <= (needs - room) * MIB


def test_without_a_budget_nothing_is_recorded() -> None:
    config = load(RUN)
    layout = Layout.parse("offload=optimizer:cpu")
    assert within_budget(config, layout, None, open_data(config)) == (layout, None)  # type: ignore[arg-type]
