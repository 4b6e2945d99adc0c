"""The search: legal, within memory, and the best of all that it admits."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from shoal.errors import ConfigError
from shoal.layout import Layout
from shoal.plan import explain, hardware
from shoal.plan.layouts import layout_of, split_of
from shoal.plan.profile import PROFILES, constants
from shoal.plan.search import Search, splits
from shoal.plan.shape import Shape, of_table
from shoal.plan.work import Job, Split

LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "gated_mlp": True}
MIXTRAL = {**LLAMA, "vocab": 32000, "experts": 8, "topk": 2, "moe_ffn": 14336}


def _job(table: dict[str, object], cluster: str, batch: int = 64) -> Job:
    shape: Shape = of_table("model", table)
    return Job(shape, hardware.cluster(cluster), 4096, batch, PROFILES["shoal"])


@pytest.mark.parametrize("table", [LLAMA, MIXTRAL], ids=["dense", "experts"])
def test_plans_are_legal_and_fit(table: dict[str, object]) -> None:
    job = _job(table, "2x8xh100")
    search = Search(job, constants())
    found = search.run(4)
    assert found.plans
    for plan in found.plans:
        assert plan.held.total <= search.memory.room
        layout = Layout.parse(search.line(plan))
        layout.check(job.shape, job.batch, 16)
        assert sum(plan.estimate.terms.values()) == pytest.approx(plan.estimate.step_s)
    seconds = [plan.estimate.step_s for plan in found.plans]
    assert seconds == sorted(seconds)


def test_no_split_that_fits_is_better_than_the_best() -> None:
    job = _job({**LLAMA, "layers": 6}, "8xh100", batch=16)
    search = Search(job, constants(), schedules=("1f1b",))
    fastest = inf
    for split in splits(job, ("1f1b",)):
        plan = search.price(split)
        if search.fits(plan):
            fastest = min(fastest, plan.estimate.step_s)
    assert search.run(4).plans[0].estimate.step_s <= fastest


def test_no_step_is_shorter_than_its_bound() -> None:
    job = _job(MIXTRAL, "2x8xh100")
    times = Search(job, constants()).times
    for split in list(splits(job, ("1f1b", "interleaved", "zb-h1")))[::97]:
        assert times.bound(split) <= times.estimate(split).step_s * (1 + 1e-9), split


def test_more_network_and_more_memory_never_hurt() -> None:
    job = _job(LLAMA, "4x8xa100-40")
    best = Search(job, constants()).run(1).plans[0].estimate.step_s
    wider = replace(job.cluster, nic=4 * job.cluster.nic)
    larger = replace(job.cluster, device=replace(job.cluster.device, memory_gib=160))
    for cluster in (wider, larger):
        assert Search(replace(job, cluster=cluster), constants()).run(1).plans[0].estimate.step_s <= best * (1 + 1e-9)


def test_a_split_survives_being_a_layout() -> None:
    split = Split(4, 2, 4, 2, zero=1, sequence=True, samples=2, micro_batches=8, recompute="full", recomputing=2)
    assert split_of(layout_of(split, "bf16"), 64) == split


def test_what_fits_nowhere_names_a_cluster_that_would_do() -> None:
    job = _job(LLAMA, "1xrtx4090", batch=16)
    assert not Search(job, constants()).run(1).plans
    message = str(explain.nothing_fits(job, constants()))
    assert "cluster = 1xrtx4090: no layout fits" in message
    named = message.rpartition("use ")[2]
    assert Search(replace(job, cluster=hardware.cluster(named)), constants()).run(1).plans


@pytest.mark.parametrize("text", ["9xh10", "lptop", "0x8xh100", "20xh100", "none.toml"])
def test_a_cluster_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster = {text}"):
        hardware.cluster(text)


def test_clusters_are_named_or_described(tmp_path) -> None:  # type: ignore[no-untyped-def]
    named = hardware.cluster("64x8xh100:400G")
    assert (named.ranks, named.nic, named.device.name) == (512, 50.0, "h100")
    path = tmp_path / "mine.toml"
    path.write_text('nodes = 2\nper_node = 4\nnic_gbit = 100\n[device]\nlike = "a100"\nmemory_gib = 60\n')
    mine = hardware.cluster(str(path))
    assert (mine.ranks, mine.nic, mine.device.memory_gib, mine.device.peak) == (8, 12.5, 60, 312)
    path.write_text("node = 2\n")
    with pytest.raises(ConfigError, match="did you mean 'nodes'"):
        hardware.cluster(str(path))
