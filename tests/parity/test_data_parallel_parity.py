"""Data parallelism computes what one process computes, to the last digits of float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config import Config, load
from shoal.data.corpus import Corpus
from shoal.data.tokenize import byte_tokenizer, tokenize
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.verify import run_reference, verify

RUNS = Path(__file__).parents[2] / "runs"
SGD = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.clip=0")
LAYOUTS = ("dp=2", "dp=3", "dp=4,mb=2")
RECIPES = {"untied": (), "tied": ("model.tied=true",), "sgd": SGD, "sgd tied": ("model.tied=true", *SGD)}


def read(run: str, recipe: str, *more: str) -> Config:
    return load(RUNS / f"{run}.toml", (*RECIPES[recipe], *more))


@pytest.mark.parametrize(("recipe", "layout"), [("tied", "dp=3"), ("sgd", "dp=4,mb=2")])
def test_replicas_agree_with_one_process(recipe: str, layout: str, pool: Pool) -> None:
    agree("tiny6", recipe, layout, pool)


@pytest.mark.parity
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("run", ["tiny", "tiny6"])
def test_layouts_agree_with_one_process(run: str, recipe: str, layout: str, pool: Pool) -> None:
    agree(run, recipe, layout, pool)


def agree(run: str, recipe: str, layout: str, pool: Pool) -> None:
    report = verify(read(run, recipe), Layout.parse(f"{layout},dtype=float64"), pool)
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-9
    assert report.drift == 0.0
    assert report.steps == 5
    assert len(report.worst) > 100, "every gradient and every weight is compared"


def test_one_process_and_accumulation_agree_too(pool: Pool) -> None:
    for layout in ("dp=1", "dp=1,mb=4"):
        report = verify(read("tiny6", "untied"), Layout.parse(f"{layout},dtype=float64"), pool, steps=3)
        assert report.agree, report.faults


def test_float32_agrees_to_its_own_precision(pool: Pool) -> None:
    report = verify(read("tiny6", "tied", "layout.dtype=float32"), Layout.parse("dp=3,mb=2"), pool)
    assert report.agree, report.faults
    assert 0 < report.max_rel["grad"] < 2e-5


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of many short documents."""
    folder = tmp_path_factory.mktemp("documents")
    text = folder / "text.txt"
    text.write_text("\n\n".join("word " * (number % 23 + 1) for number in range(400)))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tokenize(Corpus.find(text, separator="\n\n"), folder / "tokenizer.json", folder / "store")
    return folder / "store"


@pytest.mark.parametrize("layout", ["dp=4,mb=2", "dp=2,zero=3", "tp=2:1d-sp", "pp=2,mb=2,recompute=full"])
def test_documents_kept_apart_agree(layout: str, documents: Path, pool: Pool) -> None:
    """Under other kinds of parallelism too, since the mask is of whole sequences."""
    config = read("tiny6", "untied", "data.source=tokens", f"data.path={documents}", "data.documents=true")
    report = verify(config, Layout.parse(f"{layout},dtype=float64"), pool, steps=2)
    assert report.agree, report.faults


@pytest.mark.parametrize("run", ["tiny", "tiny6"])
def test_clipping_acts_in_the_run_files(run: str, pool: Pool, tmp_path: Path) -> None:
    """Else the comparison would not cover it."""
    config = read(run, "untied")
    (scalars,) = pool.run(run_reference, config, Layout.parse("dp=1,dtype=float64"), 5, tmp_path, ranks=1)
    assert min(one.grad_norm for one in scalars) > config.optimizer.clip
