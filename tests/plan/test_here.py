"""A machine as it was measured: constants that explain made-up benchmarks and steps, kept and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli import here as kept
from shoal.errors import ConfigError
from shoal.plan import here
from shoal.plan.cost import StepTimes
from shoal.plan.profile import constants
from shoal.plan.search import Search
from shoal.plan.shape import of_table
from shoal.plan.work import Job, Split

RATE, RAMP, LINK, LATENCY = 5e10, 40.0, 2e9, 5e-5
PRODUCTS = [(256, k, 512) for k in (32, 128, 512)] + [(64, 256, 256), (512, 512, 2048)]
SPEEDS = here.Speeds(
    [(m, k, n, 2.0 * m * n * (k + RAMP) / RATE) for m, k, n in PRODUCTS],
    [(2, 4, 128, 32, 2.0 * 2 * 128 * 128 * 256 * 0.5 / (0.3 * RATE))],
    2.0**23,
    2.0**23 / 1e10,
    4e-6,
)
MESSAGES = [
    here.Message(kind, ranks, amount, (LATENCY + amount * (ranks - 1) / ranks / LINK) * max(1, ranks / 2))
    for kind in ("all_gather", "reduce_scatter")
    for ranks in (2, 4)
    for amount in (16, 1 << 30)
]
SHAPE = of_table("small", {"layers": 4, "hidden": 256, "heads": 8, "ffn": 688, "vocab": 1024, "gated_mlp": True})


def machine(values: dict[str, float]) -> here.Here:
    device = here.described("float32", SPEEDS, MESSAGES, 2, 1)
    return here.Here("made up", 2, 8.0, {"float32": {1: device}, "bf16": {1: device}}, values, 0.0)


def job(found: here.Here, ranks: int) -> Job:
    return Job(SHAPE, found.cluster(ranks, "float32"), 128, 16, here.profile("float32"), "float32")


def test_benchmarks_become_a_device_of_the_catalogues_kind() -> None:
    device = machine({}).devices["float32"][1]
    start = here.first_constants(SPEEDS, MESSAGES, cores=2)
    assert device.matmul * 1e12 == pytest.approx(2 * RATE)
    assert device.memory_rate == pytest.approx(10)
    assert device.link * 1e9 == pytest.approx(LINK, rel=1e-3)
    assert start["matmul.ramp"] == pytest.approx(RAMP)
    assert start["latency.inside"] == pytest.approx(1e6 * LATENCY, rel=1e-3)
    assert start["attention.flash2.other"] == pytest.approx(0.3)


def test_constants_are_found_from_the_steps_that_they_make() -> None:
    start = here.first_constants(SPEEDS, MESSAGES, cores=2)
    found = machine(start)
    truth = {**constants(), **start, "elementwise.torch": 3.0, "latency.inside": 90.0, "optimizer.passes": 2.5}
    splits = [
        Split(samples=16),
        Split(samples=4, micro_batches=4),
        Split(samples=4, micro_batches=4, recompute="full"),
        Split(dp=2, zero=1, samples=8),
        Split(tp=2, samples=16),
        Split(pp=2, samples=2, micro_batches=8),
        Split(dp=4, samples=4),
        Split(pp=4, samples=2, micro_batches=8),
    ]
    steps = [
        here.Step(one, split, StepTimes(one, truth).estimate(split).step_s)
        for split in splits
        for one in [job(found, split.ranks)]
    ]
    other = Split(dp=2, tp=2, zero=1, samples=2, micro_batches=4)  # which nothing is fitted to
    expected = StepTimes(job(found, 4), truth).estimate(other).step_s
    values, off = here.fitted(steps, start)
    assert off < 0.02
    assert abs(StepTimes(job(found, 4), {**constants(), **start}).estimate(other).step_s / expected - 1) > 0.1
    assert StepTimes(job(found, 4), {**constants(), **values}).estimate(other).step_s == pytest.approx(
        expected, rel=0.05
    )
    assert all(values[name] == start[name] for name in start if name not in here.FITTED)


def test_ranks_that_share_cores_take_at_least_all_work_over_all_cores() -> None:
    found = machine(here.first_constants(SPEEDS, MESSAGES, cores=2))
    for split in (Split(dp=4, samples=4), Split(pp=4, samples=2, micro_batches=8), Split(dp=2, pp=2, samples=8)):
        times = StepTimes(job(found, 4), found.constants)
        estimate = times.estimate(split)
        passes = sum(sum(part.total for part in stage) for stage in times.stages(split))
        assert estimate.step_s >= passes * split.micro_batches * split.ranks / split.pp / 2
        assert sum(estimate.terms.values()) == pytest.approx(estimate.step_s)
        assert times.bound(split) <= estimate.step_s


def test_what_was_found_is_kept_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.known() is None
    with pytest.raises(ConfigError, match="cluster = 4xhere: this machine was not measured yet; run shoal calibrate"):
        kept.here_cluster("4xhere", "float32")
    found = machine({"launch.eager": 3.0})
    path = kept.keep(found)
    assert kept.known() == found == here.read(json.loads(path.read_text()))
    named = kept.here_cluster("4xhere", "float32")
    assert named is not None
    cluster, _ = named
    assert (cluster.ranks, cluster.crowd, cluster.device.memory_gib) == (4, 2.0, 2.0)
    assert kept.here_cluster("8xh100", "bf16") is None
    assert Search(job(found, 4), found.constants).run(2).plans
    path.write_text("[]")
    assert kept.known() is None
