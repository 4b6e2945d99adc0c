"""Parameter servers compute what one process computes; those that are behind, what one computes with such delays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.behind import Behind
from shoal.config import Config, load
from shoal.data_parallel.server import Server
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.verify import Report, verify

RUNS = Path(__file__).parents[2] / "runs"
SGD = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9")
RECIPES = {"adamw": (), "tied": ("model.tied=true",), "sgd": SGD, "sgd tied": ("model.tied=true", *SGD)}
SYNCHRONOUS = (
    "dp=2,sync=server",
    "dp=3,sync=server",
    "dp=4,sync=server/2",
    "dp=3,sync=server/3,mb=2",
    "dp=2,tp=2,sync=server",
    "dp=2,tp=2:1d-sp,sync=server/2",
    "dp=2,pp=2:1f1b,mb=4,sync=server",
    "dp=2,pp=2:zb-h1,mb=2,sync=server/2,recompute=full",
    "dp=2,sync=server{reduce=sum}",
    "dp=2,pp=2,mb=2,sync=server{reduce=sum}",
    "dp=3,sync=server/2{reduce=max},mb=2",
)
BEHIND = (
    "dp=2,sync=server{stale=1}",
    "dp=3,sync=server{stale=2}",
    "dp=4,sync=server/2{stale=1},mb=2",
    "dp=2,tp=2:1d-sp,sync=server/2{stale=2}",
    "dp=2,pp=2:1f1b,mb=4,sync=server{stale=1}",
    "dp=3,sync=server/2{stale=1;reduce=max}",
)


ON_GRIDS = (
    "dp=2,tp=4:2d,sync=server",
    "tp=8:2.5d,sync=server",
    "tp=8:3d,sync=server",
    "dp=2,tp=4:2x1x2,sync=server/2{stale=1}",
    "dp=4,pp=2,mb=2,sync=server/2",
)


def read(run: str, recipe: str) -> Config:
    """Sizes that nothing divides, and clipping that acts."""
    sizes = ("model.layers=3", "data.seq_len=6", "data.batch=24", "optimizer.clip=0.1")
    return load(RUNS / f"{run}.toml", (*sizes, *RECIPES[recipe]))


def checked(recipe: str, line: str, pool: Pool, run: str = "tiny6") -> Report:
    return verify(read(run, recipe), Layout.parse(f"{line},dtype=float64"), pool)


def agree(recipe: str, line: str, pool: Pool, run: str = "tiny6") -> None:
    report = checked(recipe, line, pool, run)
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-9
    assert report.drift == 0.0


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("tied", "dp=3,sync=server/2"),
        ("sgd tied", "dp=2,pp=2:1f1b,mb=4,sync=server"),
        ("adamw", "dp=2,tp=2:1d-sp,sync=server{stale=1}"),
    ],
)
def test_servers_agree_with_one_process(recipe: str, line: str, pool: Pool) -> None:
    agree(recipe, line, pool)


@pytest.mark.parity
@pytest.mark.parametrize("line", SYNCHRONOUS + BEHIND)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("run", ["tiny", "tiny6"])
def test_all_kinds_of_servers_agree_with_one_process(run: str, recipe: str, line: str, pool: Pool) -> None:
    agree(recipe, line, pool, run)


@pytest.mark.parity
@pytest.mark.parametrize("line", ON_GRIDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_servers_agree_on_grids(recipe: str, line: str, eight: Pool) -> None:
    agree(recipe, line, eight, "tiny")


@pytest.mark.parity
@pytest.mark.parametrize("name", ["lion", "muon"])
@pytest.mark.parametrize("line", ["dp=3,sync=server/2", "dp=2,tp=2,sync=server{stale=1}", "dp=2,pp=2,mb=2,sync=server"])
def test_servers_agree_under_other_optimizers(name: str, line: str, pool: Pool) -> None:
    config = load(RUNS / "tiny6.toml", ("model.layers=3", "data.batch=12", f"optimizer.name={name}"))
    report = verify(config, Layout.parse(f"{line},dtype=float64"), pool, steps=3)
    assert report.agree, report.faults


# ---- what verify has to find


def unweighted(patch: pytest.MonkeyPatch) -> None:
    """The mean of the replicas' means, which are over different numbers of tokens."""
    step = Behind.step

    def alike(self: Behind, number: int, batches: object, weights: object, contexts: object) -> None:
        step(self, number, batches, weights * 0 + 10.0, contexts)  # type: ignore[arg-type, operator]

    patch.setattr(Behind, "step", alike)


def one_step_less(patch: pytest.MonkeyPatch) -> None:
    """Servers that are not as far behind as they may be."""
    init = Behind.__init__

    def less(self: Behind, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        self._stale -= 1

    patch.setattr(Behind, "__init__", less)


def never_pulled(patch: pytest.MonkeyPatch) -> None:
    """Ranks that do not serve keep the weights that they have."""
    patch.setattr(Server, "published", lambda self: super(Server, self).published())


@pytest.mark.parametrize(
    ("plant", "line", "words"),
    [
        (unweighted, "dp=2,sync=server{stale=1}", "grad_norm differs"),
        (one_step_less, "dp=2,sync=server{stale=2}", "loss differs"),
        (never_pulled, "dp=2,sync=server", "is not the same on rank 1"),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], line: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with Pool(2) as pool:  # forked with the fault in it
        report = checked("sgd", line, pool)
    assert not report.agree
    assert any(words in fault for fault in report.faults), report.faults
