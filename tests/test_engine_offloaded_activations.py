"""Training with activations elsewhere: the same numbers, and less on the device, by what went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.build import stages_of
from shoal.comm.world import World
from shoal.config import Config, load
from shoal.layout import Layout
from shoal.memory.on_host import Arriving
from shoal.meter import Meter
from shoal.pipeline.measure import measure
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, make_model, materialise_alone, open_data
from shoal.train.verify import verify

RUNS = Path(__file__).parents[1] / "runs"
OFFLOAD, DISK = "offload=activations:cpu", "offload=activations:nvme"
SAMPLES, LENGTH = 2, 61
SMALL = 8192
"""Bytes of scalars, and of a batch's labels and positions."""


def read(**settings: object) -> Config:
    return load(RUNS / "tiny.toml", [f"{key.replace('__', '.')}={value}" for key, value in settings.items()])


# ---- numbers


@pytest.mark.parametrize(
    "line",
    [
        OFFLOAD,
        *(pytest.param(f"{line}{DISK}", marks=pytest.mark.parity) for line in ("", "dp=2,zero=3,", "pp=2:zb-v,mb=4,")),
        f"pp=2:zb-v,mb=4,{OFFLOAD}@0.5",
        *(
            pytest.param(f"{line}{OFFLOAD}", marks=pytest.mark.parity)
            for line in (
                "dp=2,zero=3,",
                "dp=2,zero=3,pp=2:1f1b,mb=4,",
                "tp=2,",
                "tp=2:1d-sp,recompute=selective,",
                "tp=4:2d,",
                "tp=4:1x2x2,recompute=full,",
                "pp=2:1f1b,mb=4,",
                "pp=2:zb-v,mb=4,",
                "pp=2:zb-v,mb=4,recompute=full,",
                "pp=2:interleaved/2,mb=4,",
                "pp=2:2bw,mb=4,",
                "pp=2:pipedream,mb=4,",
            )
        ),
    ],
)
def test_verify_agrees(line: str, pool: Pool) -> None:
    report = verify(read(model__layers=4), Layout.parse(f"{line},dtype=float64"), pool, steps=2)
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-9


def all_losses(world: World, line: str, steps: int) -> list[float]:
    """Of every step, in every bit."""
    config = read(model__layers=2, model__hidden=32, model__ffn=72, model__vocab=64, data__batch=4, run__steps=steps)
    engine, source, found = make_engine(config, Layout.parse(line), world), open_data(config), []
    for step in range(steps):
        engine.step(source.batch(step, engine.mesh.coords["dp"], engine.layout.dp))
        found += [result.loss for result in engine.finished()]
    engine.drain()
    return [*found, *(result.loss for result in engine.finished())]


@pytest.mark.parametrize(
    "line",
    [
        "mb=2",
        *(
            pytest.param(one, marks=pytest.mark.parity)
            for one in ("dp=2,zero=3", "tp=2", "pp=2:1f1b,mb=4", "pp=2:zb-v,mb=4")
        ),
    ],
)
def test_half_precision_has_the_same_losses_for_fifty_steps(line: str, pool: Pool) -> None:
    ranks = Layout.parse(line).ranks
    stays, goes = (pool.run(all_losses, f"{line},dtype=bf16{more}", 50, ranks=ranks)[0] for more in ("", f",{OFFLOAD}"))
    assert len(stays) == 50
    assert stays == goes
    assert len(set(stays)) > 40


def lost(world: World, config: Config) -> bool:
    """Whether a gradient norm shows that some bytes came back otherwise than they went."""
    engine, source = make_engine(config, Layout.parse(f"{OFFLOAD},dtype=float64"), world), open_data(config)
    norm = engine.step(source.batch(0)).grad_norm  # type: ignore[union-attr]
    other = make_engine(config, Layout.parse(f"{OFFLOAD},dtype=float64"), world)
    wait = Arriving.wait
    try:
        Arriving.wait = lambda self: wait(self).roll(8)  # type: ignore[method-assign]
        return norm != other.step(source.batch(0)).grad_norm  # type: ignore[union-attr]
    finally:
        Arriving.wait = wait  # type: ignore[method-assign]


def test_what_comes_back_is_what_gradients_are_made_of(pool: Pool) -> None:
    assert pool.run(lost, read(model__layers=2), ranks=1) == [True]


# ---- bytes


def held(world: World, line: str, counts: Sequence[int]) -> list[tuple[int, int]]:
    """For each number of micro-batches, all of one size: most bytes in a step beyond what is there between steps, on
    the device and on the host."""
    found = []
    for count in counts:
        config = sizes(count)
        engine, source = make_engine(config, exact(f"{line},mb={count}"), world), open_data(config)
        with Meter() as meter:
            engine.step(source.batch(0))  # shows the meter what is there before
            batch, before = source.batch(1), meter.live()
            meter.label("batch", batch.values())
            with meter.phase("step"):
                engine.step(batch)
            found.append((meter.peak("step") - before, meter.host_peak("step")))
            assert meter.live("host") == 0
    return found


def sizes(count: int) -> Config:
    return read(model__layers=4, model__dropout=0, model__vocab=96, data__seq_len=LENGTH, data__batch=SAMPLES * count)


def exact(line: str) -> Layout:
    return Layout.parse(f"{line},dtype=float64")


def kept_by_layers() -> list[float]:
    """Bytes that each layer keeps of a micro-batch, measured of the layers alone."""
    task = make_model(sizes(1), exact("dp=1"))
    materialise_alone(task, seed=0)
    return list(measure(task, open_data(sizes(1)).batch(0), repeats=1).held)


@pytest.mark.parametrize("fraction", [1.0, pytest.param(0.5, marks=pytest.mark.parity)])
def test_the_device_has_less_by_what_went_to_the_host(fraction: float, pool: Pool) -> None:
    """GPipe: each further micro-batch adds to the peak what a stage keeps of it. What goes does not."""
    line, counts = "pp=2:gpipe", (3, 6)
    stays = pool.run(held, line, counts, ranks=2)
    goes = pool.run(held, f"{line},{OFFLOAD}@{fraction}", counts, ranks=2)
    layers = kept_by_layers()
    stages = stages_of(exact(line), (task := make_model(sizes(1), exact(line))).layers(), task.roles)
    for rank, units in enumerate(stages):
        grown = 3 * sum(layers[unit] for unit in list(units)[: 3 if rank == 0 else 2])  # all but the head
        with_all, with_less = (after[0] - before[0] for before, after in (stays[rank], goes[rank]))
        host = goes[rank][1][1] - goes[rank][0][1]
        if fraction == 1.0:
            assert host == pytest.approx(grown, rel=0.05), f"stage {rank}"
        assert with_all - with_less == pytest.approx(host, rel=0.05), f"stage {rank}"
        assert 0.4 * fraction * grown < host < 1.6 * fraction * grown
        assert all(one[1] == 0 for one in stays[rank])


def test_alone_everything_but_the_last_unit_is_on_the_host_when_the_backward_pass_begins(pool: Pool) -> None:
    (stays, none), (goes, host) = (pool.run(held, line, (1,), ranks=1)[0][0] for line in ("dp=1", OFFLOAD))
    assert none == 0
    assert host == pytest.approx(sum(kept_by_layers()[:-1]), rel=0.05)
    assert stays - goes > 0.3 * host, "gradients take the place of some of it before the step's peak"


def test_a_batch_is_not_moved(pool: Pool) -> None:
    """A module of one's own takes what it is given in; it stays where the batch is."""
    assert pool.run(own_module, ranks=1) == [0]


def own_module(world: World) -> int:
    import shoal

    module = torch.nn.Sequential(torch.nn.Linear(300, 2), torch.nn.Linear(2, 2)).double()

    def loss(output: Tensor, _: object) -> Tensor:
        return output.square().sum()

    engine = shoal.Engine(module, exact(OFFLOAD), world=world, loss=loss)
    with Meter() as meter:
        engine.step({"inputs": torch.randn(64, 300, dtype=torch.float64)})
        return meter.host_peak()
