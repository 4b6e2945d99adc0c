"""One rank of a job by itself, beside the same rank among the others: the same words and bytes, to the last one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dry_ranks import as_real, evenly, measured

from shoal.config import Config, load
from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.train.dryrun import check, dryrun
from shoal.train.pool import Pool
from shoal.train.setup import fit

RUNS = Path(__file__).parents[2] / "runs"


def read(line: str, *more: str) -> tuple[Config, Layout]:
    config = load(RUNS / "tiny.toml", ("model.layers=2", "data.seq_len=8", "model.vocab=67", *more))
    plan = Layout.parse(line)
    return config, fit(config, plan, plan.ranks)


@pytest.mark.parametrize("line", ["dp=2,zero=1,mb=2", "dp=2,tp=2:1d-sp,zero=3,dtype=bf16", "dp=2,pp=2,mb=2", "cp=2"])
def test_a_rank_alone_takes_what_it_takes_among_others(pool: Pool, line: str) -> None:
    config, layout = read(line)
    real = pool.run(measured, config, layout, ranks=layout.ranks)
    for rank in (0, layout.ranks - 1):
        as_real(dryrun(config, layout, rank), *real[rank])


WITH_EXPERTS = (
    "model.hidden=32", "model.experts=4", "model.experts_per_token=2", "model.expert_ffn=20", "model.gate=softmax",
    "model.shared_experts=1", "model.balance_loss=0.05",
)  # fmt: skip


def test_with_experts_a_rank_alone_takes_what_it_takes_when_load_is_even(pool: Pool) -> None:
    config, layout = read("dp=2,ep=2", *WITH_EXPERTS)
    even, uneven = (pool.run(kind, config, layout, ranks=2) for kind in (evenly, measured))
    for rank in range(2):
        found = dryrun(config, layout, rank)
        assert found.even_load
        as_real(found, *even[rank])
        _, received, _ = uneven[rank]
        assert [one for one in found.received if one.purpose != "experts"] == [
            one for one in received if one.purpose != "experts"
        ]


@pytest.mark.parametrize(("ep", "etp"), [(32, 1), (16, 2)])
def test_what_is_exchanged_for_experts_is_what_even_load_makes_of_it(ep: int, etp: int) -> None:
    """There and back, in both passes: 4·k·N·h words a layer, to each part of an expert, but for those that stay."""
    hidden, layers, k, samples, length, mb = 32, 2, 2, 512, 8, 2
    config, layout = read(
        f"dp=64,ep={ep},etp={etp},mb={mb}", *WITH_EXPERTS, f"data.batch={samples}", "model.experts=32"
    )
    (found,) = (one for one in dryrun(config, layout, rank=37).received if one.purpose == "experts")
    pairs = k * samples * length // layout.dp
    assert found.words == 4 * layers * hidden * (etp * pairs - pairs // ep)
    assert found.calls == 4 * layers * mb


def test_a_rank_of_two_thousand_differs_from_one_of_few_by_what_its_replicas_exchange() -> None:
    """Stage and tensor-parallel part are the same: N replicas exchange (N−1)/N of it, in parts that are rounded up."""
    few, many = (
        dryrun(*read(f"tp=2,pp=2,dp={dp},zero=1,mb=2", f"data.batch={2 * dp}"), rank=4 * dp - 1) for dp in (2, 512)
    )
    assert (many.world, many.rank) == (2048, 2047)
    assert many.actions == few.actions
    before, found = ({one[:3]: one for one in each.received} for each in (few, many))
    assert before.keys() == found.keys()
    for key, one in found.items():
        if key[1:] in (("dp", "gradients"), ("dp", "parameters")):
            part, whole = one.words / 511, 2 * before[key].words
            assert part == int(part)
            assert whole / 512 <= part < whole / 512 + one.calls
        elif key[1] in ("tp", "pp"):
            assert one == before[key]


def test_as_json() -> None:
    found = dryrun(*read("dp=2,mb=2"), rank=1).as_json()
    assert found["peak_bytes"] == max(phase["total"] for phase in found["memory"]["phases"].values())
    assert found["actions"][:2] == ["F0.0", "B0.0"]
    assert {"collective", "axis", "purpose", "calls", "words", "bytes"} == set(found["collectives"][0])
    assert (found["world"], found["rank"], found["layout"]) == (2, 1, "dp=2,mb=2")


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"--rank = {rank}: the world has 2 ranks; use 0 to 1"):
        check(Layout.parse("dp=2"), rank)


def test_a_disk_is_refused() -> None:
    with pytest.raises(LayoutError, match="use optimizer:cpu"):
        check(replace(Layout.parse("dp=2,offload=optimizer:nvme"), mb=2), 0)
