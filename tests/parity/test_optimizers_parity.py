"""Every optimizer under every kind of layout computes what the textbook's does in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shoal.checkpoint import read_manifest
from shoal.comm.world import World
from shoal.config import Config, load
from shoal.layout import Layout
from shoal.optim import muon as muon_module
from shoal.optim.moves import Held, Plan, plan
from shoal.optim.muon import orthogonalise
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data
from shoal.train.verify import verify

RUNS = Path(__file__).parents[2] / "runs"
MUON = "optimizer.name=muon"
GROUPS = (
    'optimizer.groups=[{match="*.k.weight", lr=0.5, weight_decay=0.0}, {match="blocks.[01].*.gate.weight", lr=2.0}, '
    '{match="embed.*", name="lion", lr=0.1}, {match="*norm*", weight_decay=0.3}]'
)
RECIPES = {
    "lion": ("optimizer.name=lion",),
    "muon": (MUON,),
    "muon and groups": (MUON, GROUPS, "model.tied=true"),
    "groups": (GROUPS,),
    "tables under muon": (MUON, 'optimizer.groups=[{match="embed.*", name="muon"}]', "model.tied=true"),
}
LAYOUTS = (
    *("dp=2", "dp=2,zero=1", "dp=3,zero=2", "dp=2,zero=3", "dp=4,zero=3/2"),
    *("tp=2", "tp=3", "pp=2:1f1b,mb=4", "tp=2:1d-sp,pp=2:1f1b,mb=4", "dp=2,tp=2,zero=3", "dp=2,pp=2:gpipe,zero=1,mb=2"),
)
QUICK = [
    ("tiny6", "muon and groups", "dp=2,zero=3"),
    ("tiny", "muon", "tp=2:1d-sp,pp=2:1f1b,mb=4"),
    ("tiny6", "muon", "dp=2,tp=2,zero=3"),
    ("tiny6", "lion", "dp=3,zero=2"),
    ("tiny6", "groups", "tp=3"),
    ("tiny6", "tables under muon", "pp=2:1f1b,mb=4"),
]


def read(run: str, recipe: str, *more: str) -> Config:
    return load(RUNS / f"{run}.toml", (*RECIPES[recipe], "optimizer.lr=3e-3", *more))


def check(run: str, recipe: str, line: str, steps: int, pool: Pool) -> None:
    report = verify(read(run, recipe), Layout.parse(f"{line},dtype=float64"), pool, steps=steps)
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-9
    assert report.drift == 0.0
    assert len(report.worst) > 100, "every gradient and every weight is compared"


@pytest.mark.parametrize(("run", "recipe", "line"), QUICK)
def test_an_optimizer_agrees_with_the_textbook(run: str, recipe: str, line: str, pool: Pool) -> None:
    check(run, recipe, line, 3, pool)


@pytest.mark.parity
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_optimizer_agrees_under_every_layout(recipe: str, line: str, pool: Pool) -> None:
    check("tiny6", recipe, line, 5, pool)


@pytest.mark.parity
def test_muon_agrees_where_heads_are_on_several_ranks(eight: Pool) -> None:
    check("tiny", "muon", "tp=8", 3, eight)
    check("tiny", "muon and groups", "dp=2,tp=2,pp=2:1f1b,zero=3,mb=4", 3, eight)


GPT2 = (
    *("model.norm=layer", "model.positions=learned", "model.activation=gelu", "model.gated=false"),
    *("model.qkv_bias=true", "model.out_bias=true", "model.ffn_bias=true"),
)
KEYS = "optimizer.groups=[{match='*.[qkv].bias', name='adamw'}]"


@pytest.mark.parity
@pytest.mark.parametrize("line", ["dp=2,zero=3", "tp=2:1d-sp,pp=2:1f1b,mb=4"])
@pytest.mark.parametrize("recipe", ["muon", "lion"])
def test_positions_and_biases_agree_too(recipe: str, line: str, pool: Pool) -> None:
    """But for a key's bias under Lion, whose gradient is zero but for rounding: its sign is noise."""
    config = read("tiny6", recipe, *GPT2, KEYS)
    report = verify(config, Layout.parse(f"{line},dtype=float64"), pool, steps=3)
    assert report.agree, report.faults
    if recipe == "lion":
        noisy = verify(read("tiny6", recipe, *GPT2), Layout.parse(f"{line},dtype=float64"), pool, steps=3)
        assert noisy.faults, "else the group above would have nothing to mend"
        assert all(".k.bias" in fault for fault in noisy.faults)


def in_halves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        muon_module, "orthogonalise", lambda x: torch.cat([orthogonalise(half) for half in x.tensor_split(2)])
    )


def one_never_comes_back(patch: pytest.MonkeyPatch) -> None:
    def without(held: Sequence[Mapping[str, Held]], rank: int) -> Plan:
        right = plan(held, rank)
        kept = [move for move in right.scatter if move.name != "blocks.1.attn.v.weight" or move.source == move.to]
        return replace(right, scatter=tuple(kept))

    patch.setattr(muon_module, "plan", without)


@pytest.mark.parametrize(
    ("plant", "line", "named"),
    [
        (in_halves, "tp=2", {"blocks.5.attn.q.weight", "blocks.0.ffn.down.weight"}),
        (one_never_comes_back, "dp=2", {"blocks.1.attn.v.weight"}),
    ],
)
def test_a_fault_of_muon_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], line: str, named: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with Pool(2) as pool:
        report = verify(read("tiny6", "muon"), Layout.parse(f"{line},dtype=float64"), pool, steps=1)
    assert named <= {fault.split()[1] for fault in report.faults}
    assert not any("norm.weight" in fault or "embed" in fault for fault in report.faults)


def course(world: World, config: Config, line: str, start: Path | None, until: int, folder: Path) -> list[float]:
    """Losses up to step ``until``, from the checkpoint ``start`` or the beginning; saves there."""
    layout = Layout.parse(f"{line},dtype=float64")
    engine, source = make_engine(config, layout, world), open_data(config)
    if start is not None:
        engine.load(start)
    coords = engine.mesh.coords
    losses = [engine.step(source.batch(step, coords["dp"], layout.dp)).loss for step in range(engine.steps_done, until)]
    engine.save(folder)
    return losses


@pytest.mark.parametrize(("one", "other"), [("dp=2,tp=2,zero=3", "pp=2:1f1b,mb=4"), ("tp=3", "dp=2,zero=1")])
def test_momenta_go_from_layout_to_layout(one: str, other: str, pool: Pool, tmp_path: Path) -> None:
    config = read("tiny6", "muon and groups")

    def run(line: str, start: Path | None, until: int, name: str) -> list[float]:
        ranks = Layout.parse(line).ranks
        return pool.run(course, config, line, start, until, tmp_path / name, ranks=ranks)[0]

    unbroken = run("dp=1", None, 6, "unbroken")
    first = run(one, None, 3, "first")
    second = run(other, tmp_path / "first", 6, "second")
    assert first + second == pytest.approx(unbroken, rel=1e-10)
    path = next((tmp_path / "second").glob("step-*"))
    kinds = read_manifest(path).tensors
    assert "blocks.0.attn.q.weight" in kinds["momentum_buffer"]
    assert "blocks.0.attn.q.weight" not in kinds["exp_avg"]
    assert "embed.table.weight" in kinds["exp_avg"], "Lion's"
    assert "embed.table.weight" not in kinds["exp_avg_sq"]
    box = kinds["momentum_buffer"]["blocks.0.attn.q.weight"].boxes[0]
    with safe_open(path / box.file, "pt") as file:
        assert file.get_tensor(box.key).any()
