"""The planner's memory against what papers print, and its rules against each other."""

from __future__ import annotations

import pytest

from shoal.plan import hardware
from shoal.plan.memory import Memory, saved, states
from shoal.plan.profile import PROFILES
from shoal.plan.shape import Layer, Shape
from shoal.plan.work import Job, Split

LAYER = Layer(hidden=6144, heads=64, kv_heads=64, head_dim=96, ffn=4 * 6144, gated=False)


@pytest.mark.parametrize(
    ("zero", "ranks", "gb"), [(0, 64, 120.0), (1, 64, 31.4), (2, 64, 16.6), (3, 64, 1.88), (1, 4, 52.5)]
)
def test_states_are_those_of_the_zero_paper(zero: int, ranks: int, gb: float) -> None:
    """Table 1, 7.5 billion parameters."""
    assert sum(states(7.5e9, zero, ranks)) / 1e9 == pytest.approx(gb, rel=5e-3)


def test_a_layer_keeps_what_korthikanti_counts() -> None:
    """Table 2: sbh(34 + 5as/h) bytes without recomputation, of which 10 sbh are not divided by tensor parallelism."""
    one = saved(LAYER, fused=False, dropout=True)
    assert one.outer == 10 * 6144
    assert one.inner == 24 * 6144
    assert one.scores == 5 * 64


def _job(layers: int = 8) -> Job:
    shape = Shape("gpt", ((layers, LAYER),), vocab=51200)
    return Job(shape, hardware.cluster("2x8xa100"), 2048, 64, PROFILES["megatron-2022"])


def test_each_way_to_save_memory_saves_some() -> None:
    memory = Memory(_job())
    base = Split(dp=2, tp=4, pp=2, micro_batches=16, samples=2)
    plain = memory.most(base).total
    for lighter in (
        {"recompute": "selective"},
        {"recompute": "full"},
        {"recompute": "full", "recomputing": 1},
        {"zero": 1},
        {"offload": 0.5},
        {"sequence": True},
    ):
        assert memory.most(base._replace(**lighter)).total < plain, lighter


def test_nothing_holds_less_than_the_bound() -> None:
    memory = Memory(_job())
    for pp, schedule, chunks in ((1, "1f1b", 1), (2, "1f1b", 1), (4, "interleaved", 2), (2, "zb-v", 2)):
        split = Split(dp=16 // (2 * pp), tp=2, pp=pp, schedule=schedule, chunks=chunks, micro_batches=16)
        lightest = split._replace(recompute="full", offload=1.0)
        assert memory.least(split) <= memory.most(lightest).total


def test_early_ranks_of_1f1b_hold_more_micro_batches() -> None:
    ranks = Memory(_job()).ranks(Split(dp=1, tp=4, pp=4, micro_batches=16))
    kept = [held.activations for held in ranks]
    assert kept == pytest.approx([4 * kept[3], 3 * kept[3], 2 * kept[3], kept[3]])
