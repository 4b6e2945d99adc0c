"""What each rank of a pipeline holds at its peak is what the simulation of its program says, from the bytes that one
process measured of each layer.

Activations, their gradients, what waits for weights' gradients, what is on its way between stages, and what passes need
within themselves: everything but model states. Sizes are such that these dominate, and that little divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, UntypedStorage, nn

from shoal.build import passes_of, run_of, stages_of
from shoal.comm.world import World
from shoal.config import Config, load
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.meter import Meter
from shoal.model.context import Batch
from shoal.model.linear import Linear
from shoal.model.task import PlainTask
from shoal.pipeline.layer_costs import LayerCosts, by_stage
from shoal.pipeline.lower import lower
from shoal.pipeline.measure import measure
from shoal.pipeline.simulate import simulate
from shoal.tensor.whole import Whole
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, make_model, materialise_alone, open_data

RUNS = Path(__file__).parents[2] / "runs"
LIMIT = 0.05
MODEL = {"layers": 8, "hidden": 24, "heads": 6, "kv_heads": 3, "ffn": 37, "vocab": 53, "dropout": 0}
SAMPLES = 3
"""A micro-batch."""
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved/2", "zb-v", "dualpipe-v")


def read(micro_batches: int) -> Config:
    settings = [f"model.{name}={value}" for name, value in MODEL.items()]
    return load(RUNS / "tiny.toml", [*settings, "data.seq_len=61", f"data.batch={SAMPLES * micro_batches}"])


def exact(line: str) -> Layout:
    return Layout.parse(f"{line},dtype=float64")


class Activations(Meter):
    """The most bytes of a step beyond what there is between steps, gradients of weights not counted."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self.base = self.most = 0

    def begin(self) -> None:
        self.base, self.most = self.beside_gradients(), 0

    def beside_gradients(self) -> int:
        return self.live() - sum({id(one): one.nbytes() for one in self._gradients()}.values())

    def _gradients(self) -> Iterator[UntypedStorage]:
        for main in self._engine._sync._mains:
            for gradient in (main.gradient, main.held.parameter.grad):
                if gradient is not None:
                    yield gradient.untyped_storage()

    def _record(self) -> None:
        super()._record()
        if self.live() - self.base > self.most:
            self.most = max(self.most, self.beside_gradients() - self.base)


def peak_of(engine: Engine, batches: Callable[[int], Batch]) -> int:
    """Of this rank, in its second step."""
    with Activations(engine) as meter:
        engine.step(batches(0))  # shows the meter what is there before
        batch = batches(1)
        meter.label("batch", batch.values())
        meter.begin()
        engine.step(batch)
        return meter.most


def peak(world: World, line: str) -> int:
    layout = exact(line)
    config = read(layout.mb)
    return peak_of(make_engine(config, layout, world), open_data(config).batch)


@cache
def measured(recompute: str) -> LayerCosts:
    config, layout = read(1), exact(f"dp=1,recompute={recompute}")
    task = make_model(config, layout)
    materialise_alone(task, seed=0)
    runs = [run_of(layout, task, Whole(), unit, 0) for unit in range(len(task.layers()))]
    return measure(task, open_data(config).batch(0), repeats=1, runs=runs)


def predicted(line: str) -> tuple[float, ...]:
    layout = exact(line)
    task = make_model(read(1), layout)
    stages = stages_of(layout, task.layers(), task.roles)
    return simulate(lower(passes_of(layout)), by_stage(measured(layout.recompute), stages)).peaks


def check(line: str, pool: Pool) -> None:
    compare(line, pool.run(peak, line, ranks=exact(line).pp), predicted(line))


def compare(line: str, found: Sequence[int], expected: Sequence[float]) -> None:
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == pytest.approx(other, rel=LIMIT), f"{line}, rank {rank}: {one / other:.4f} of the prediction"


def test_a_split_backward_pass_needs_what_its_simulation_says(pool: Pool) -> None:
    check("pp=2:zb-h1,mb=3", pool)


@pytest.mark.parity
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_needs_what_its_simulation_says(schedule: str, ranks: int, pool: Pool) -> None:
    check(f"pp={ranks}:{schedule},mb=8", pool)


@pytest.mark.parity
@pytest.mark.parametrize(
    "line",
    [
        "pp=4:1f1b{layers=1/1/2/4},mb=5",
        "pp=2:1f1b-overlap,mb=6",
        "pp=2:zb-v,mb=8,recompute=full",
        "pp=4:1f1b,mb=8,recompute=full",
        "pp=2:gpipe,mb=4,recompute=selective",
    ],
)
def test_uneven_and_recomputed_stages_do_too(line: str, pool: Pool) -> None:
    check(line, pool)


# ---- a user's own module


def own_task() -> PlainTask:
    """Layers that hold their output, their input, or neither; half of them of other widths."""
    torch.manual_seed(0)
    widths = (5, 9, 7, 12, 3)
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += (nn.Linear(width, following), nn.Tanh(), Linear(following, following), nn.Flatten(1))
    return PlainTask(nn.Sequential(*layers).double(), lambda output, _: output.square().sum())


def inputs(micro_batches: int) -> dict[str, Tensor]:
    return {"inputs": torch.randn(401 * micro_batches, 5, dtype=torch.float64)}


def own_peak(world: World, line: str) -> int:
    layout = exact(line)
    return peak_of(Engine(own_task(), layout, world=world), lambda _: inputs(layout.mb))


@pytest.mark.parity
@pytest.mark.parametrize(
    "line",
    [
        "pp=4:gpipe,mb=5",
        "pp=4:1f1b,mb=8",
        "pp=3:zb-h1,mb=8",
        "pp=4:interleaved/2,mb=8",
        "pp=2:zb-v,mb=8",
    ],
)
def test_the_stages_of_any_module_do_too(line: str, pool: Pool) -> None:
    layout, task = exact(line), own_task()
    costs = by_stage(measure(task, inputs(1), repeats=1), stages_of(layout, task.layers(), {}))
    expected = simulate(lower(passes_of(layout)), costs).peaks
    compare(line, pool.run(own_peak, line, ranks=layout.pp), expected)
