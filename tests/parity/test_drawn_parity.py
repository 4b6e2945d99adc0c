"""A hundred layouts drawn over all axes, of up to sixteen ranks, with experts of every gate and either attention: each
computes what one process computes, or is refused for a reason that is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from shoal.config import Config, load
from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.layout.kinds import SCHEDULES
from shoal.train.pool import Pool
from shoal.train.setup import fit
from shoal.train.verify import verify

pytestmark = pytest.mark.parity

RUN = Path(__file__).parents[2] / "runs" / "tiny-moe.toml"
SMALL = (
    "model.layers=4", "model.hidden=48", "model.heads=4", "model.kv_heads=2", "model.ffn=50", "model.vocab=97",
    "model.expert_ffn=21", "model.balance_loss=0.05", "model.gate_z_loss=0.01", "model.dropout=0.1",
    'data.source="synthetic"', "optimizer.clip=0.1",
)  # fmt: skip
"""Eight experts; widths that nothing divides, losses of the gate that show, and clipping that acts."""

GATES: tuple[tuple[str, ...], ...] = (
    (),
    ('model.gate="topk-softmax"', "model.gate_renormalise=false"),
    ('model.gate="sigmoid"', "model.bias_rate=0.05", "model.gate_scale=2.5"),
    ('model.gate="sigmoid"', "model.gate_groups=4", "model.gate_top_groups=2", "model.bias_rate=0"),
    ('model.gate="sinkhorn"',),
    ('model.gate="expert-choice"',),
)
LATENT = (
    "model.kv_heads=4",
    "model.latent={rank=7, query_rank=9, plain_dim=3, turned_dim=4, value_dim=6}",
)
MODELS: tuple[tuple[str, ...], ...] = (
    (),
    ("model.tied=false", "model.window=6"),
    ("model.shared_experts=0", "model.dense_layers=1"),
    ("model.tied=false", *LATENT),
    ("model.capacity=0.9",),
)
TENSOR = (
    *[(1, "")] * 2, (2, ""), (2, ":1d-sp"), (4, ":2d"), (4, ":2d{form=loop}"), (4, ":2.5d/1"), (2, ":2x1x1"),
    (4, ":1x2x2"), (8, ":3d"), (8, ":2.5d/2"), (2, ":1x2x1"), (4, ":2x1x2"),
)  # fmt: skip
OFFLOADS = (
    "activations:cpu",
    "optimizer:cpu@0.5",
    "optimizer:cpu+params:cpu",
    "optimizer:nvme+grads:cpu",
)
REFUSALS = (
    "attention heads",
    "hidden size",
    "a global batch of",
    "stages are more than the model's",
    "micro-batches",
    "does not divide dp·cp",
    "do not divide over",
    "which zero > 1 cannot shard",
    "has several versions of",
    "the two copies of a tied embedding drift apart",
    "steps overlap",
    "servers have all experts",
    "servers keep",
    "sync=server keeps",
)
"""What a layout may be refused for."""


@pytest.fixture(scope="module")
def sixteen() -> Iterator[Pool]:
    with Pool(16) as workers:
        yield workers


def drawn(random: Random) -> str:
    """A line of up to sixteen ranks, most often of several axes, whether it fits or not."""
    while True:
        dp, pp, cp = (random.choice([1, 1, 2, 2, 4]) for _ in range(3))
        tp, kind = random.choice(TENSOR)
        if 2 < dp * pp * cp * tp <= 16:
            break
    ways = ["ring", "gather", "ulysses", *(["2x2", "2x2"] if cp == 4 else ())]
    parts = [f"dp={dp}", f"tp={tp}{kind}", f"cp={cp}:{random.choice(ways)}"]
    if pp > 1:
        schedule = random.choice([name for name in SCHEDULES if name != "list"])
        chunks = "/2" if SCHEDULES[schedule].any_chunks and pp == 2 and random.random() < 0.5 else ""
        parts.append(f"pp={pp}:{schedule}{chunks}")
    inside = dp * cp * tp
    ep = random.choice([n for n in (1, 2, 2, 4, 4, 8) if inside % n == 0])
    etp = random.choice([n for n in (1, 1, 2) if inside % (ep * n) == 0])
    parts += [f"ep={ep}", f"etp={etp}"]
    zero = random.choice([0, 1, 2, 3])
    parts.append(f"zero={zero}" + ("/2" if zero and dp * cp % 2 == 0 and random.random() < 0.3 else ""))
    parts.append(f"mb={random.choice([1, 2, 4]) * (2 * pp if pp > 1 else 1)}")
    parts.append(f"recompute={random.choice(['none', 'none', 'selective', 'full'])}")
    if random.random() < 0.25:
        parts.append(f"offload={random.choice(OFFLOADS)}")
    if zero == 0 and random.random() < 0.2:
        parts.append("sync=server" + random.choice(["", "{stale=1}"]))
    return ",".join(parts)


def case(number: int) -> tuple[str, Config]:
    random = Random(f"all axes {number}")
    line = drawn(random)
    settings = [*SMALL, *random.choice(GATES), *random.choice(MODELS), f"data.seq_len={random.choice([5, 13, 16, 29])}"]
    dp, mb = (int(part.partition("=")[2]) for part in line.split(",") if part.startswith(("dp=", "mb=")))
    settings.append(f"data.batch={dp * mb * random.choice([1, 1, 2, 3])}")
    return line, load(RUN, settings)


@pytest.mark.parametrize("number", range(100))
def test_a_layout_drawn_over_all_axes_agrees(number: int, sixteen: Pool) -> None:
    line, config = case(number)
    try:
        layout = Layout.parse(f"{line},dtype=float64")
        fit(config, layout, layout.ranks)
    except LayoutError as error:
        if not any(reason in str(error) for reason in REFUSALS):
            pytest.fail(f"{line}: {error}")
        return
    report = verify(config, layout, sixteen, steps=2)
    assert report.agree, f"{line}: {report.faults[:9]}"
    assert max(report.max_rel.values()) < 1e-9, line
