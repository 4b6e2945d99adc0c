"""A model whose positions are divided is the model that has them all: in a step, in an evaluation, in text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import model_of

from shoal.comm.world import World
from shoal.config import Config, load
from shoal.context.zigzag import Division
from shoal.errors import ConfigError, LayoutError
from shoal.layout import Layout
from shoal.model.context import Context
from shoal.train.pool import Pool
from shoal.train.setup import fit, make_engine, open_data
from shoal.train.verify import verify

RUNS = Path(__file__).parents[2] / "runs"
SMALL = ("model.layers=2", "data.batch=4", "optimizer.lr=0.5")

Array = np.ndarray[Any, Any]


def read(*settings: str, run: str = "tiny") -> Config:
    return load(RUNS / f"{run}.toml", [*SMALL, *settings])


@pytest.mark.parametrize("line", ["cp=4:ring", "cp=4:2x2", "cp=2:ulysses,tp=2:1d-sp", "cp=2:gather,pp=2,mb=2,zero=1"])
def test_a_layout_agrees_with_one_process(line: str, pool: Pool) -> None:
    report = verify(read("data.seq_len=29"), Layout.parse(f"{line},dtype=float64"), pool, steps=2)
    assert report.agree, report.faults


def lengths(world: World, config: Config, line: str) -> list[tuple[float, float]]:
    """Losses and norms of steps of one length after another, and the evaluation of the last samples."""
    engine, source = make_engine(config, Layout.parse(f"{line},dtype=float64"), world), open_data(config)
    found = []
    for step, length in enumerate((9, 32, 1, 17)):
        batch = source.batch(step)
        short = {name: x[:, :length] if x.ndim > 1 and x.shape[1] >= length else x for name, x in batch.items()}
        result = engine.step(short)
        assert result is not None
        found.append((result.loss, result.grad_norm))
    return [*found, engine.evaluate(short)]


@pytest.mark.parametrize("line", ["cp=4:ring", "cp=4:ulysses", "dp=1,cp=2,tp=2:1d-sp"])
def test_steps_may_be_of_different_lengths(line: str, pool: Pool) -> None:
    config = read("model.dropout=0.1")
    (alone,) = pool.run(lengths, config, "dp=1", ranks=1)
    for found in pool.run(lengths, config, line, ranks=Layout.parse(line).ranks):
        np.testing.assert_allclose(np.array(found), np.array(alone), rtol=1e-9)


def speak(world: World, config: Config, line: str) -> Array:
    """The logits after a prompt and after each of some tokens that follow it."""
    engine = make_engine(config, Layout.parse(f"{line},dtype=float64"), world)
    decode = engine.decoding()
    return np.stack([decode(given).numpy() for given in ([7, 20, 33, 8, 90], [3], [25], [3])])


@pytest.mark.parametrize("line", ["cp=2:ring", "cp=2,tp=2:1d-sp", "cp=2:ulysses,pp=2"])
def test_a_text_is_generated_on_every_rank(line: str, pool: Pool) -> None:
    config = read("model.window=3")
    (alone,) = pool.run(speak, config, "dp=1", ranks=1)
    for found in pool.run(speak, config, line, ranks=Layout.parse(line).ranks):
        np.testing.assert_allclose(found, alone, rtol=1e-10, atol=1e-12)


def told(world: World, config: Config, line: str) -> tuple[list[int], int]:
    """The places that the context of a micro-batch tells, and how many positions its samples have."""
    engine = make_engine(config, Layout.parse(f"{line},dtype=float64"), world)
    seen: list[Context] = []
    see = engine._interpreter.see
    engine._interpreter.see = lambda ctx: (seen.append(ctx), see(ctx))[1]  # type: ignore[method-assign]
    engine.step(open_data(config).batch(0))
    assert seen[0].places is not None
    return seen[0].places.tolist(), seen[0].length


@pytest.mark.parametrize(
    ("line", "places"),
    [
        ("cp=2", [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("cp=2:ulysses", [[0, 1, 2], [3, 4, 5]]),
        ("tp=2:1d-sp", [[0, 1, 2], [3, 4, 5]]),
        ("cp=2,tp=2:1d-sp", [[0, 1], [6, 7], [2, 3], [4, 5]]),
        ("cp=2:ulysses,tp=2:1d-sp", [[0, 1], [2, 5], [3, 4], [5, 5]]),
    ],
)
def test_a_context_tells_which_positions_of_the_sample_are_here(line: str, places: list[list[int]], pool: Pool) -> None:
    """Those from the length of the sample on are padding, whoever pads."""
    found = pool.run(told, read("data.seq_len=5"), line, ranks=len(places))
    assert [[min(place, 5 if "ulysses,tp" in line else place) for place in one] for one, _ in found] == places
    assert {length for _, length in found} == {5}


def given_another_batch(world: World, config: Config) -> str:
    engine = make_engine(config, Layout.parse("cp=2,dtype=float64"), world)
    try:
        engine.step(open_data(config).batch(world.rank))
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_divide_positions_must_have_the_same_samples(pool: Pool) -> None:
    for said in pool.run(given_another_batch, read(), ranks=2):
        assert "the ranks of one replica were given different samples" in said


@pytest.mark.parametrize(
    ("line", "problem", "legal"),
    [
        ("cp=3:ulysses", r"layout.cp = 3:ulysses: 8 attention heads .* × 3 Ulysses ranks", "cp=2:ulysses or cp=4"),
        ("cp=6:3x2", r"layout.cp = 6:3x2: 8 attention heads .* × 3 Ulysses ranks", "cp=4:2x2 or cp=8:4x2"),
        ("tp=4,cp=4:4x1", r"layout.cp = 4:4x1: 8 attention heads .* 4 tensor-parallel × 4", "use cp=2:2x1"),
    ],
)
def test_heads_that_do_not_divide_are_refused(line: str, problem: str, legal: str) -> None:
    with pytest.raises(LayoutError, match=problem) as error:
        fit(read(), Layout.parse(line), Layout.parse(line).ranks)
    assert legal in str(error.value)


def test_learned_positions_are_counted_by_the_whole_text() -> None:
    """Of which each rank has a part that would fit."""
    tokens = torch.zeros(1, 20, dtype=torch.int64)
    part = Division(ring=2).part({"tokens": tokens, "positions": torch.arange(20)[None]}, 0)
    with pytest.raises(ConfigError, match="no position for a text of 20 tokens"):
        model_of("gpt2").context(part)


# ---- fewer samples than rows of a grid


def words(world: World, config: Config, line: str) -> dict[str, float]:
    engine = make_engine(config, Layout.parse(f"{line},dtype=float64"), world)
    engine.step(open_data(config).batch(0))
    return {key: n for key, n in world.ledger.table().items() if key.endswith("/context")}


@pytest.mark.parametrize(("line", "rows"), [("tp=4:2d", 2), ("tp=4:4x1x1", 4), ("cp=2,tp=2:2x1x1", 2)])
def test_rows_divide_positions_where_there_are_fewer_samples(line: str, rows: int, pool: Pool) -> None:
    """Keys and values of the rows' positions go round them, and where there are as many samples as rows, nothing."""
    report = verify(read("data.batch=1", "data.seq_len=13"), Layout.parse(f"{line},dtype=float64"), pool, steps=1)
    assert report.agree, report.faults
    ring = rows * Layout.parse(line).cp
    for samples in {1, rows}:
        config = read(f"data.batch={samples}", "data.seq_len=32")
        columns = 2 if "2d" in line else 1
        there = 32 * samples * 2 * config.model.kv_heads * config.model.head_dim // columns
        folded = 2 * (2 * (ring - 1) / ring + 1) * there  # two blocks
        for found in pool.run(words, config, line, ranks=Layout.parse(line).ranks):
            if samples < rows:
                assert sum(found.values()) == folded
            elif "cp" not in line:
                assert not found
