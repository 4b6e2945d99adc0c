"""A checkpoint knows no layout: saved under any, loaded under any other, weights and moments bit for bit."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from shoal.checkpoint import read_manifest
from shoal.comm.world import World
from shoal.config import Config, load
from shoal.layout import Layout
from shoal.placement import assemble
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data

RUN = Path(__file__).parents[2] / "runs" / "tiny.toml"
LAYOUTS = (
    "dp=1",
    "dp=3,zero=3,mb=2",
    "dp=4,zero=3/2",
    "dp=2,tp=2,zero=1",
    "tp=4:1d-sp",
    "pp=4:1f1b,mb=4",
    "dp=2,pp=2:gpipe,zero=2,mb=2",
    "dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4,recompute=full",
    "pp=3:1f1b{layers=4/2/2},tp=2,mb=3",
    "dp=8,zero=2",
    "dp=3,sync=server/2,mb=2",
    "dp=2,tp=2,pp=2,sync=server,mb=2",
)
HALF, WHOLE = 10, 20

Tensors = dict[tuple[str, str], Tensor]


def course(world: World, config: Config, layout: Layout, start: Path | None, until: int, folder: Path) -> list[float]:
    """Losses from the checkpoint ``start``, or the beginning, to step ``until``; saves there, and, where it starts from
    a checkpoint, at once as well."""
    engine, source = make_engine(config, layout, world), open_data(config)
    if start is not None:
        engine.load(start)
        engine.save(folder / "again")
    coords = engine.mesh.coords
    losses = [engine.step(source.batch(step, coords["dp"], layout.dp)).loss for step in range(engine.steps_done, until)]
    engine.save(folder)
    return losses


def contents(path: Path) -> Tensors:
    """Every tensor of a checkpoint, put together from its boxes."""
    found: Tensors = {}
    for kind, tensors in read_manifest(path).tensors.items():
        for name, stored in tensors.items():
            boxes = []
            for box in stored.boxes:
                with safe_open(path / box.file, "pt") as file:
                    boxes.append((box.box, file.get_tensor(box.key)))
            found[kind, name] = assemble(stored.shape, boxes)
            assert not found[kind, name].isnan().any(), f"some of {kind} {name} was saved by nobody"
    return found


def run(pool: Pool, line: str, tied: bool, start: Path | None, until: int, folder: Path) -> tuple[list[float], Path]:
    config = load(RUN, [f"model.tied={str(tied).lower()}"])
    layout = Layout.parse(f"{line},dtype=float64")
    layout = layout.fill(layout.ranks)
    every = pool.run(course, config, layout, start, until, folder, ranks=layout.ranks)
    assert all(losses == every[0] for losses in every)
    return every[0], folder


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def unbroken(
    request: pytest.FixtureRequest, eight: Pool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, list[float]]:
    losses, _ = run(eight, "dp=1", request.param, None, WHOLE, tmp_path_factory.mktemp("unbroken"))
    return request.param, losses


def check(pool: Pool, one: str, other: str, unbroken: tuple[bool, list[float]], folder: Path) -> None:
    tied, truth = unbroken
    _, first = run(pool, one, tied, None, HALF, folder / "first")
    losses, second = run(pool, other, tied, first, WHOLE, folder / "second")
    assert losses == pytest.approx(truth[HALF:], rel=1e-9)
    saved, again = (contents(next(path.glob("step-*10"))) for path in (first, second / "again"))
    assert saved.keys() == again.keys()
    assert {kind for kind, _ in saved} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(saved[key], again[key]) for key in saved)


@pytest.mark.parametrize(
    ("one", "other"),
    [(LAYOUTS[6], LAYOUTS[4])],
)
def test_training_goes_on_under_another_layout(
    one: str, other: str, unbroken: tuple[bool, list[float]], eight: Pool, tmp_path: Path
) -> None:
    check(eight, one, other, unbroken, tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(25))
def test_fifty_random_pairs(seed: int, unbroken: tuple[bool, list[float]], eight: Pool, tmp_path: Path) -> None:
    one, other = Random(seed).sample(LAYOUTS, 2)
    check(eight, one, other, unbroken, tmp_path)
