"""What a grid saves any layout loads, and Hugging Face's transformers too: bit for bit, out of and into every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from engine_ranks import Held, put_together, weights
from families import config
from hf_folders import save_tiny, write_llama
from safetensors.torch import load_file
from test_any_to_any import Tensors, contents, course

from shoal.checkpoint import resolve
from shoal.comm.world import World
from shoal.config import Config
from shoal.data.batches import Synthetic
from shoal.layout import Layout
from shoal.model.hf import Weights
from shoal.train.exporting import export_hf
from shoal.train.importing import import_hf, load_hf
from shoal.train.pool import Pool

KINDS = (
    "dp=1",
    "tp=4:1d",
    "tp=4:1d-sp",
    "tp=4:2d",
    "tp=8:2.5d",
    "tp=8:3d",
    "tp=6:1x2x3",
)
PRODUCTS = ("tp=4:1x2x2,pp=2:1f1b,mb=2", "dp=2,tp=4:4x1x1,zero=3", "tp=4:2d{form=loop},pp=2,zero=1,mb=2")
QUICK = (("tp=8:3d", "tp=4:2d"), ("tp=8:2.5d", "dp=1"), ("tp=4:1d-sp", "tp=6:1x2x3"))
HALF, WHOLE = 2, 4
RUN = config("llama3", heads=12, kv_heads=12, head_dim=4, layers=2, tied=True, ffn=29)
"""Heads that three and four divide; a feed-forward and a vocabulary that nothing does."""


def run(pool: Pool, run: Config, line: str, start: Path | None, until: int, folder: Path) -> list[float]:
    layout = Layout.parse(f"{line},dtype=float64")
    first, *others = pool.run(course, run, layout, start, until, folder, ranks=layout.ranks)
    assert all(losses == first for losses in others)
    return first  # type: ignore[no-any-return]


def saved(folder: Path) -> Tensors:
    (path,) = folder.glob("step-*")
    return contents(path)


@pytest.fixture(scope="module")
def unbroken(eight: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run(eight, RUN, "dp=1", None, WHOLE, tmp_path_factory.mktemp("unbroken"))


@pytest.fixture(scope="module")
def half_way(eight: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with the checkpoint that a kind has saved."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("saved")
            run(eight, RUN, kind, None, HALF, made[kind])
        return made[kind]

    return of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.parity)
        for pair in (
            *product(KINDS, KINDS),
            *zip(PRODUCTS, KINDS[3:6], strict=True),
            *zip(KINDS[3:6], PRODUCTS, strict=True),
        )
    ],
)
def test_what_a_kind_saves_any_other_goes_on_from(
    one: str, other: str, unbroken: list[float], half_way: Callable[[str], Path], eight: Pool, tmp_path: Path
) -> None:
    first = half_way(one)
    assert run(eight, RUN, other, first, WHOLE, tmp_path) == pytest.approx(unbroken[HALF:], rel=1e-9)
    before, after = saved(first), saved(tmp_path / "again")
    assert before.keys() == after.keys()
    assert {kind for kind, _ in before} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parity
@pytest.mark.parametrize("line", ["tp=4", "tp=8:2x2x2", "dp=2,tp=4:4x1x1,zero=3"])
def test_a_rank_without_a_column_saves_and_loads(line: str, eight: Pool, tmp_path: Path) -> None:
    """A feed-forward of three columns, and as few in-features of its second matrix."""
    few = config("gpt2", ffn=3, layers=2)
    whole = run(eight, few, "dp=1", None, WHOLE, tmp_path / "whole")
    run(eight, few, line, None, HALF, tmp_path / "first")
    for other in ("dp=1", line):
        folder = tmp_path / other.replace(":", "-")
        assert run(eight, few, other, tmp_path / "first", WHOLE, folder) == pytest.approx(whole[HALF:], rel=1e-9)
        before, after = saved(tmp_path / "first"), saved(folder / "again")
        assert all(torch.equal(before[key], after[key]) for key in before)


# ---- Hugging Face


HF_LINES = ("tp=4:2d", "tp=8:2.5d,zero=3", "tp=8:3d", "tp=4:1x1x4", "dp=2,tp=4:4x1x1,zero=3", "tp=4:2x1x2")


@dataclass(frozen=True)
class Tuned:
    """What a rank has after a step from an imported model, and where that was saved."""

    loaded: list[Held]
    held: list[Held]
    path: Path


def tune(world: World, folder: Path, imported: Path, line: str, out: Path) -> Tuned:
    """Load a Hugging Face folder and its import, take a step, and save with what an export asks of a checkpoint."""
    engine, again = (load_hf(folder, line, world=world) for _ in range(2))
    meta = again.load(imported, states=False)
    loaded = weights(engine)
    assert all((one.values == other.values).all() for one, other in zip(loaded, weights(again), strict=True))
    source = Synthetic(vocab=engine.task.shape.vocab, seq_len=9, batch=8, seed=3)  # type: ignore[attr-defined]
    engine.step(source.batch(0, engine.mesh.coords["dp"], engine.layout.dp))
    return Tuned(loaded, weights(engine), engine.save(out, meta))


def there_and_back(folder: Path, line: str, pool: Pool, root: Path) -> None:
    """A folder into a grid, and out of it after a step, has the bits that the grid has."""
    ranks = Layout.parse(line).ranks
    imported, out, back = root / "imported", root / "out", root / "back"
    import_hf(folder, imported, lambda *_: None)
    told = pool.run(tune, folder, resolve(imported), line, out, ranks=ranks)
    stored, full = Weights(folder), put_together(one.loaded for one in told)
    assert full.keys() == stored.shapes.keys()
    for name, shape in stored.shapes.items():
        assert torch.equal(full[name], stored.read(name, tuple((0, n) for n in shape)).double()), name
    export_hf(told[0].path, back, lambda *_: None)
    exported, tuned = Weights(back), put_together(one.held for one in told)
    assert exported.shapes == stored.shapes
    for name, shape in exported.shapes.items():
        assert torch.equal(exported.read(name, tuple((0, n) for n in shape)).double(), tuned[name]), name
        assert not torch.equal(tuned[name], full[name]), f"the step has moved {name}"
    assert load_file(back / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=() if line == "tp=8:3d" else pytest.mark.parity) for line in HF_LINES]
)
def test_a_llama_of_hugging_face_goes_through_a_grid(line: str, eight: Pool, tmp_path: Path) -> None:
    there_and_back(write_llama(tmp_path / "llama"), line, eight, tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("line", ["tp=4:2d", "tp=8:2.5d", "tp=8:3d", "tp=4:1x1x4"])
@pytest.mark.parametrize("name", ["llama3", "llama-biases", "qwen3", "gemma", "gpt2", "gpt2-untied"])
def test_every_family_of_hugging_face_goes_through_a_grid(name: str, line: str, eight: Pool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_tiny(name, tmp_path / "theirs")
    there_and_back(tmp_path / "theirs", line, eight, tmp_path)
