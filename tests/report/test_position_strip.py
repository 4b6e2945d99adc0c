"""The strip of positions, and the words that context parallelism is said to cost."""

from __future__ import annotations

import pytest
from test_wording import run_of, told

from shoal.comm.world import World
from shoal.layout import Layout
from shoal.report.position_strip import strip
from shoal.report.wording import meaning
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("cp=2", [(0, 0, 1), (1, 1, 3), (0, 3, 4)]),
        ("cp=2:ulysses", [(0, 0, 1), (1, 1, 2)]),
        ("cp=4:2x2", [(0, 0, 1), (1, 1, 2), (2, 2, 3), (3, 3, 4), (2, 4, 5), (3, 5, 6), (0, 6, 7), (1, 7, 8)]),
    ],
)
def test_the_strip_has_the_parts_of_a_sample_in_order(line: str, parts: list[tuple[int, int, int]]) -> None:
    assert list(strip(Layout.parse(line))) == parts


def words_of_a_step(world: World, line: str, layers: int) -> tuple[float, int, int]:
    """Words that a rank receives for attention; and those of all keys and values, and of all queries, keys, values
    and results of a sample."""
    layout = Layout.parse(line)
    run = run_of(layout, layers)
    engine, batch = make_engine(run, layout, world), open_data(run).batch(0)
    engine.step(batch)
    shape, tokens = run.model, batch["tokens"].numel()
    kv = 2 * tokens * shape.kv_heads * shape.head_dim
    return world.ledger.words(purpose="context"), kv, kv + 2 * tokens * shape.heads * shape.head_dim


@pytest.mark.parametrize("line", ["cp=2", "cp=4", "cp=4:gather", "cp=4:ulysses"])
def test_a_block_receives_the_words_that_are_told(line: str, pool: Pool) -> None:
    for words, kv, everything in pool.run(words_of_a_step, line, 1, ranks=Layout.parse(line).ranks):
        elements = everything if "ulysses" in line else kv
        (cost,) = [cost for key, _, cost in meaning(Layout.parse(line)) if key.startswith("cp=")]
        number = float(cost.split("; gradients")[0].split()[-1])
        assert words == pytest.approx(number * elements, rel=5e-3)


def test_ranks_of_one_replica_that_hold_the_same_are_told() -> None:
    said = {
        line: "\n".join(map(" ".join, meaning(Layout.parse(line)))) for line in ("cp=2", "dp=2,cp=2", "cp=2,zero=1")
    }
    assert (
        "gradients are summed over cp once a step; words received for each of its parameters: 2(N−1)/N = 1"
        in (said["cp=2"])
    )
    assert "gradients are summed over dp·cp once" in said["dp=2,cp=2"]
    assert "optimizer states are divided by 2 over cp" in said["cp=2,zero=1"]
    assert told("cp=2", "cp") == 1
