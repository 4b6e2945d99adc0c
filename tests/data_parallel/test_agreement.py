"""Every way of keeping replicas equal computes what one process does."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from replicas import KINDS, Found, Replica, Values, assembled, batch, odd_model, one_process, poisoned

from shoal.comm.world import World
from shoal.train.pool import Pool

STEPS, MICRO_BATCHES = 3, 2
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    **{f"{kind} small buckets": (kind, {"cap_bytes": 400}) for kind in KINDS},
    **{f"{kind}/2": (kind, {"size": 2}) for kind in KINDS[1:]},
    "zero3 resident": ("zero3", {"resident": True}),
}
FAILURES = ("forward", "backward", "reduced")
Steps = list[tuple[list[Found], float]]


def batches(step: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch(step, rank, number) for number in range(MICRO_BATCHES)]


def train(world: World, kind: str, options: dict[str, Any], fails: str = "") -> Steps:
    """What this rank has after each step, and the norm. All ranks begin alike. Before the last
    step, another may fail half-way."""
    replica = Replica(world, odd_model(0), kind, **options)
    results = []
    for step in range(STEPS):
        with poisoned(replica.sync):
            if fails and step == STEPS - 1:
                fail(replica, fails, batches(99, world.rank))
            results.append((replica.step(batches(step, world.rank)), replica.norm))
    return results


def fail(replica: Replica, place: str, given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A step that ends in its second micro-batch, at unit 2, or before the update."""

    def stop(*_: object) -> None:
        raise ZeroDivisionError

    replica.sync.begin()
    replica.passes(*given[0], final=False)
    if place == "reduced":
        replica.passes(*given[1], final=True)
        replica.reduce()
        return
    hook = replica.layers[2].register_forward_pre_hook(stop) if place == "forward" else None
    with suppress(ZeroDivisionError):
        replica.passes(*given[1], final=True, at=lambda unit: stop() if unit == 2 else None)
        raise AssertionError("it was to fail")
    if hook:
        hook.remove()


def train_all(world: World) -> dict[str, Steps]:
    fit = {name: each for name, each in OPTIONS.items() if world.size % each[1].get("size", 1) == 0}
    return {name: train(world, *each) for name, each in fit.items()}


def fail_all(world: World) -> dict[str, Steps]:
    return {f"{kind} {fails}": train(world, kind, {"cap_bytes": 400}, fails) for kind in KINDS for fails in FAILURES}


def check(by_rank: list[Steps], ranks: int) -> None:
    expected: list[tuple[Values, float]] = one_process(
        odd_model(), [[each for rank in range(ranks) for each in batches(step, rank)] for step in range(STEPS)]
    )
    for results, (values, norm) in zip(zip(*by_rank, strict=True), expected, strict=True):
        full = assembled([has for has, _ in results])
        full |= {key: value for key, value in values.items() if not value.numel()}  # nothing has no boxes
        torch.testing.assert_close(full, values, rtol=1e-12, atol=1e-12)
        assert [of_rank for _, of_rank in results] == pytest.approx([norm] * len(results), rel=1e-12)


@pytest.fixture(scope="module")
def trained(pool: Pool) -> dict[int, list[dict[str, Steps]]]:
    """By number of ranks, for each rank: one world serves all ways of training."""
    return {ranks: pool.run(train_all, ranks=ranks, timeout_s=20) for ranks in (2, 3, 4)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_norm_weights_and_states_are_those_of_one_process(
    trained: dict[int, list[dict[str, Steps]]], ranks: int, name: str
) -> None:
    """Parameters that are shared, unused, used by some ranks only, through a sink, through autograd, and through both;
    three steps of two micro-batches. What a buffer held before, and what memory held, is NaN."""
    if ranks % OPTIONS[name][1].get("size", 1) == 0:
        check([by_name[name] for by_name in trained[ranks]], ranks)
    else:
        assert name not in trained[ranks][0], "groups divide the replicas"


@pytest.fixture(scope="module")
def failed(pool: Pool) -> list[dict[str, Steps]]:
    return pool.run(fail_all, ranks=2, timeout_s=20)


@pytest.mark.parametrize("fails", FAILURES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_failed_leaves_no_trace_in_the_next(failed: list[dict[str, Steps]], kind: str, fails: str) -> None:
    check([by_name[f"{kind} {fails}"] for by_name in failed], ranks=2)
