"""``list`` made for times and a limit of memory computes what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config import load
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.verify import verify

pytestmark = pytest.mark.parity

TINY = Path(__file__).parents[2] / "runs" / "tiny.toml"


@pytest.mark.parametrize(
    "line",
    [
        "pp=2:list{times=10/12/9/1},mb=8",
        "pp=4:list/2{times=10/12/9/1;memory=2},mb=8",
        "pp=4:list{layers=4/1/2/1;times=1/2/0.5/0.1;memory=3.5},mb=5",
        "pp=4:list{times=1/2/0/0;memory=1},mb=8",
        "dp=2,pp=2:list/3{times=1/1.5/0.5/0;memory=1.5},zero=3,mb=4",
        "dp=2,tp=2,pp=2:list/2{layers=1/3/3/1;times=1/1.5/0.5/0.2},zero=1,mb=4,recompute=full",
        "tp=4:2d,pp=2:list{layers=5/3;times=2/3/2/1},mb=4",
    ],
)
def test_it_agrees(line: str, eight: Pool) -> None:
    config = load(TINY, ["data.seq_len=8", "model.vocab=96", "data.batch=40", "model.tied=true"])
    report = verify(config, Layout.parse(f"{line},dtype=float64"), eight, steps=3)
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-9
    assert report.drift < 1e-12
