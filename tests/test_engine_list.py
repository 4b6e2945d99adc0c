"""``list`` made to measure: the order that a layout and a model make, and that engines under it compute what they
should. All combinations are in tests/parity/test_list_parity.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.build import homes_of, list_costs, passes_of, programs_of, shares_of, sharing_of, stages_of
from shoal.config import Config, load
from shoal.layout import Layout
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Op
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulate import even, simulate
from shoal.train.pool import Pool
from shoal.train.setup import make_model
from shoal.train.verify import verify

RUNS = Path(__file__).parents[1] / "runs"
SHORT = "times=1/1.5/0.5/0"


def read(*more: str) -> Config:
    small = ("model.layers=4", "model.hidden=24", "model.heads=4", "model.kv_heads=2", "model.ffn=32")
    return load(RUNS / "tiny6.toml", [*small, "data.seq_len=6", "data.batch=8", "optimizer.clip=0.1", *more])


def shares(line: str, *more: str) -> tuple[float, ...]:
    layout = Layout.parse(line)
    model = make_model(read(*more), layout)
    stages = stages_of(layout, model.layers(), model.roles)
    return shares_of(layout, model.layers(), model.roles, stages)


def test_stages_share_the_times_by_what_they_compute_with() -> None:
    line = f"pp=2:list{{layers=3/1;{SHORT}}},mb=4"
    block, head = 24 * (24 + 2 * 12 + 24) + 3 * 24 * 32 + 2 * 24, 24 * 6 + 24
    found = shares(line, "model.vocab=6", "model.tied=false")
    mean = (4 * block + head) / 2
    assert found == pytest.approx((3 * block / mean, (block + head) / mean))
    costs = list_costs(Layout.parse(line), found)
    assert sum(costs.forward) == pytest.approx(2)
    assert costs.input_gradient == pytest.approx([1.5 * time for time in costs.forward])
    assert costs.held == (1, 1), "memory is counted in micro-batches"


def test_the_unit_of_times_does_not_matter() -> None:
    milliseconds, seconds = (Layout.parse(f"pp=3:list/2{{times={times}}},mb=5") for times in ("8/16/4/2", "2/4/1/0.5"))
    assert passes_of(milliseconds) == passes_of(seconds)
    assert passes_of(milliseconds, (1.25, 0.75) * 3) == passes_of(seconds, (1.25, 0.75) * 3)


def test_without_times_stages_are_alike() -> None:
    for line in ("pp=3:list/2,mb=4", "pp=3:list/2{memory=2},mb=4", "pp=3:zb-h1,mb=4"):
        assert shares(line, "model.layers=6") == ()
    assert passes_of(Layout.parse("pp=3:list/2,mb=4")) == SCHEDULES["list"](3, 4, 2)


def test_the_order_is_that_of_the_times_and_keeps_within_the_memory() -> None:
    costs, times = even(4, 2, input_gradient=1.5, weight_gradient=0.5), ("{" + SHORT + "}", "")
    ours, others = (simulate(passes_of(Layout.parse(f"pp=4:list/2{one},mb=8")), costs).makespan for one in times)
    assert (ours, others) == (26.75, 33), "as in docs/pipeline.md"
    for memory in (1, 2.5):
        layout = Layout.parse(f"pp=4:list/2{{{SHORT};memory={memory}}},mb=8")
        for given in ((), (0.5, 1.5, 1.0, 0.75, 1.25, 1.0, 1.5, 0.5)):
            assert max(simulate(passes_of(layout, given), even(4, 2)).peaks) <= memory + 1e-9


def test_uneven_stages_have_an_order_of_their_own_on_the_same_ranks() -> None:
    layout = Layout.parse(f"pp=4:list/2{{{SHORT}}},mb=8")
    given = (0.9, 1.1, 0.9, 1.1, 0.9, 0.9, 0.9, 1.3)
    costs = list_costs(layout, given)
    made, alike = (simulate(passes_of(layout, one), costs).makespan for one in (given, ()))
    assert made < alike
    whole = lower(passes_of(layout, given))
    for rank in range(layout.pp):
        assert programs_of(layout, rank, given).train == whole[rank]
        assert whole[rank].stages == tuple(stage for stage, home in enumerate(homes_of(layout)) if home == rank)


def test_a_backward_pass_may_be_in_two_whatever_the_model() -> None:
    for line in ("pp=2:list,mb=4", f"pp=2:list{{{SHORT}}},mb=4"):
        assert sharing_of(Layout.parse(line)).split_backward
    assert any(act.op is Op.WEIGHT_GRADIENT for one in passes_of(Layout.parse("pp=2:list,mb=4")) for act in one.actions)


@pytest.mark.parametrize("line", ["pp=2:list{layers=3/1;times=10/13/7/1;memory=1.5},mb=4"])
def test_it_agrees(line: str, pool: Pool) -> None:
    report = verify(read(), replace(Layout.parse(line), dtype="float64"), pool, steps=2)
    assert report.agree, report.faults
    assert max(report.max_rel.values()) < 1e-12
