"""Whatever lives on the host or a disk, every layout computes what one process computes that has all at hand."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from shoal.config import load
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.verify import verify

RUN = Path(__file__).parents[2] / "runs" / "tiny6.toml"
SMALL = ("model.layers=3", "data.seq_len=13", "optimizer.clip=0.3")

TARGETS = ("optimizer:cpu", "optimizer:cpu@0.4", "optimizer:nvme", "params:cpu", "params:nvme@0.6", "grads:cpu",
           "optimizer:nvme@0.7+params:cpu+grads:cpu")  # fmt: skip
LAYOUTS = ("dp=1,mb=3", "dp=2,zero=3", "tp=2", "pp=2,mb=2")
MORE = (
    "dp=3,zero=1,mb=2",
    "dp=2,zero=2,mb=3",
    "dp=4,zero=3/2,mb=3",
    "dp=2,pp=2:zb-h1,zero=3,mb=2",
    "dp=2,tp=3:1d-sp,zero=3,mb=2,recompute=full",
    "tp=4:2d",
    "tp=8:2.5d/2,zero=1",
    "tp=8:3d",
    "pp=2:interleaved/1,mb=2",
)
STREAMS = ("pp=2:2bw,mb=3", "pp=2:pipedream,mb=3", "dp=2,pp=2:2bw,mb=3,zero=1")
QUICK = {("dp=2,zero=3", TARGETS[-1]), ("pp=2,mb=2", "params:nvme@0.6"), ("tp=2", "optimizer:cpu@0.4")}


def cases() -> list[object]:
    pairs = [(line, target) for line in LAYOUTS for target in TARGETS]
    pairs += [(line, target) for line in MORE for target in (TARGETS[-1], "params:cpu", "grads:cpu")]
    pairs += [(line, target) for line in STREAMS for target in ("optimizer:cpu@0.4", "optimizer:nvme")]
    return [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.parity) for pair in pairs]


@pytest.mark.parametrize(("line", "target"), cases())
def test_a_layout_agrees_whatever_is_away(line: str, target: str, eight: Pool) -> None:
    run = RUN if ":3d" not in line and "2.5d" not in line and ":2d" not in line else RUN.with_name("tiny.toml")
    tied = f"model.tied={str('pipedream' not in line).lower()}"
    report = verify(load(run, [*SMALL, tied]), Layout.parse(f"{line},offload={target},dtype=float64"), eight, 3)
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-9


@pytest.mark.parity
@pytest.mark.parametrize("name", ["lion", "muon", "sgd"])
def test_every_optimizer_agrees(name: str, eight: Pool) -> None:
    random = Random(name)
    for line in (*LAYOUTS, *random.sample(MORE, 2)):
        away = f"optimizer:cpu@{random.choice([0.3, 1.0])}+params:{random.choice(['cpu', 'nvme'])}@0.8+grads:cpu"
        run = RUN if ":2" not in line and ":3d" not in line else RUN.with_name("tiny.toml")
        config = load(run, [*SMALL, f"optimizer.name={name}", "optimizer.momentum=0.9"])
        report = verify(config, Layout.parse(f"{line},offload={away},dtype=float64"), eight, 2)
        assert report.agree, (line, away, report.faults)
