from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.collectives import start_all_reduce
from shoal.comm.world import World
from shoal.data_parallel import allreduce
from shoal.data_parallel.allreduce import AllReduce
from shoal.data_parallel.buckets import Bucket, build_buckets
from shoal.local import LocalParameter
from shoal.placement import Holders, whole
from shoal.train.pool import Pool

UNITS = 3


class Replica:
    """Three units of a matrix and a vector (32 bytes each), and the buckets that were sent, in that order."""

    def __init__(self, world: World, patch: pytest.MonkeyPatch, cap_bytes: int = 1) -> None:
        everyone = Holders(tuple(range(world.size)), tuple(range(world.size)))
        shapes = {"n": (2,), "w": (2, 3)}
        self.held = {
            f"{letter}{unit}": LocalParameter(
                f"{letter}{unit}", nn.Parameter(torch.zeros(shape)), unit, whole(letter, shape), (everyone,)
            )
            for unit in range(UNITS)
            for letter, shape in shapes.items()
        }
        self.buckets = build_buckets(self.held.values(), cap_bytes=cap_bytes)
        self.summed: list[Bucket] = []
        self.sync = AllReduce(self.buckets, lambda ranks: world.group(ranks, "dp"), self.summed.append)
        self.sent: list[int] = []
        starts = {bucket.grads.data_ptr(): number for number, bucket in enumerate(self.buckets)}

        def watched(gradients: torch.Tensor, *rest: Any) -> Any:
            self.sent.append(starts[gradients.data_ptr()])
            return start_all_reduce(gradients, *rest)

        patch.setattr(allreduce, "start_all_reduce", watched)

    def backward(self, unit: int, final: bool, **gradients: float) -> None:
        """Autograd leaves gradients in ``.grad``; then the unit is done."""
        for name, value in gradients.items():
            parameter = self.held[name].parameter
            parameter.grad = torch.full_like(parameter, value)
        self.sync.unit_done(unit, final)

    def end(self) -> dict[str, float]:
        """Finish the step; returns the value of each main gradient."""
        self.sync.reduce()
        self.sync.finish()
        assert self.summed == self.buckets, "each is told once, in order"
        self.summed.clear()
        self.sync.begin()
        found: dict[str, float] = {}
        for bucket in self.buckets:
            for slot in bucket.slots:
                (found[slot.held.name],) = bucket.grad(slot).unique().tolist()
        return found


def uneven(world: World) -> list[tuple[list[int], list[int], dict[str, float], float]]:
    """Two steps of two micro-batches. Rank 1 uses none of unit 2 and half of unit 1, and completes unit 1 alone."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        replica = Replica(world, patch)
        for step in range(2):
            replica.sent.clear()
            value = (world.rank + 1) * 10.0**step
            for last in (False, True):
                for unit, names in {2: ("w2", "n2"), 1: ("w1", "n1"), 0: ("w0", "n0")}.items():
                    used = [name for name in names if world.rank == 0 or name in ("w1", "w0", "n0")]
                    final = last and (world.rank == 0 or unit == 1)
                    replica.backward(unit, final, **dict.fromkeys(used, value))
            early = list(replica.sent)
            gradients = replica.end()
            found.append((early, list(replica.sent), gradients, world.ledger.words("dp", "gradients")))
    return found


def test_ranks_that_use_different_parameters_send_the_same_buckets_and_agree(pool: Pool) -> None:
    """What a rank did not use counts as zero. The words are those of one exchange a step."""
    expected = {"w2": 2.0, "n2": 2.0, "w1": 6.0, "n1": 2.0, "w0": 6.0, "n0": 6.0}
    for rank, (first, second) in enumerate(pool.run(uneven, ranks=2, timeout_s=20)):
        for step, (early, sent, gradients, words) in enumerate((first, second)):
            assert early == ([], [0, 1, 2])[rank == 0], "as soon as a bucket and all before it are complete"
            assert sent == [0, 1, 2]
            assert gradients == {name: value * 10**step for name, value in expected.items()}
            assert words == (step + 1) * 2 * 1 / 2 * 8 * UNITS


def test_a_bucket_waits_for_all_of_its_units_and_for_the_last_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(World(), monkeypatch, cap_bytes=64)
    for unit in (2, 1, 0):
        replica.backward(unit, False, **{f"w{unit}": 1.0})
    replica.backward(2, True, w2=1.0)
    assert replica.summed == []
    replica.backward(1, True, w1=1.0)
    assert replica.summed == replica.buckets[:1], "alone there is nobody to wait for"
    replica.backward(0, True, w0=1.0)
    assert replica.summed == replica.buckets[:2]
    assert replica.end() == {"w2": 2.0, "n2": 0.0, "w1": 2.0, "n1": 0.0, "w0": 2.0, "n0": 0.0}
    assert all(one.parameter.grad is None for one in replica.held.values())


def test_a_gradient_after_its_bucket_was_sent_is_an_error_until_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(World(), monkeypatch)
    replica.backward(2, True, w2=1.0)
    replica.backward(1, False, w1=1.0)
    with pytest.raises(AssertionError, match="w2 came after its bucket was sent"):
        replica.backward(2, True, w2=1.0)
    replica.held["w2"].parameter.grad = None
    replica.end()
    replica.backward(2, True, w2=5.0)
    assert replica.end() == {"w2": 5.0, "n2": 0.0, "w1": 0.0, "n1": 0.0, "w0": 0.0, "n0": 0.0}


def split_holders(world: World) -> list[float]:
    """A bucket whose first parameter all four ranks sum and whose second each pair does."""
    pair = (0, 1) if world.rank < 2 else (2, 3)
    held = [
        LocalParameter(name, nn.Parameter(torch.zeros(2)), unit, whole(name, (2,)), (Holders(ranks, ranks),))
        for name, unit, ranks in (("all", 1, (0, 1, 2, 3)), ("pair", 0, pair))
    ]
    (bucket,) = build_buckets(held)
    sync = AllReduce([bucket], lambda ranks: world.group(ranks, "dp"), lambda _: None)
    for one in held:
        one.parameter.grad = torch.full((2,), 10.0**world.rank)
        sync.unit_done(one.unit, True)
    sync.finish()
    return bucket.grads[::2].tolist()


def test_each_range_of_a_bucket_is_summed_by_those_who_hold_it(pool: Pool) -> None:
    assert pool.run(split_holders) == [[1111, 11]] * 2 + [[1111, 1100]] * 2
