"""What each way of keeping replicas equal costs: words received, and bytes held."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from replicas import KINDS as EVERY_KIND
from replicas import Replica, batch, square_model
from torch import Tensor

from shoal.comm.world import World
from shoal.data_parallel import flat as flat_module
from shoal.data_parallel import sync as sync_module
from shoal.data_parallel import visits as visits_module
from shoal.data_parallel.sync import Sync
from shoal.data_parallel.zero import IN_FLIGHT
from shoal.meter import Meter
from shoal.train.pool import Pool

KINDS = tuple(kind for kind in EVERY_KIND if kind != "server")  # whose ranks are not alike (test_server.py)
UNITS = 7
BYTES = 4  # of a float32
Batches = list[tuple[Tensor, Tensor]]


def batches(width: int, rank: int, count: int, dtype: torch.dtype = torch.float64) -> Batches:
    given = [batch(0, rank, number, wide=width, out=width) for number in range(count)]
    return [(x.to(dtype), target.to(dtype)) for x, target in given]


# ---- words


class Words(NamedTuple):
    """Received in one step, or in a forward pass alone."""

    gradients: float
    parameters: float
    norm: float
    without_gradients: float


WORD_CASES = [
    (kind, size, count, width)
    for kind in KINDS
    for size in (None, 2)
    for count in (1, 3)
    for width in (12, 5)  # of which 12² divides by 2, 3 and 4, and 5² by none of them
    if (size is None and (count == 1 or width == 12)) or (kind != "allreduce" and width == 12)
]


def words(world: World) -> dict[tuple[object, ...], Words]:
    results = {}
    for case in WORD_CASES:
        kind, size, count, width = case
        if world.size % (size or world.size):
            continue
        replica = Replica(world, square_model(UNITS, width), kind, size=size, cap_bytes=1)
        ledger = world.ledger
        ledger.clear()
        replica.step(batches(width, world.rank, count))
        step = [ledger.words(purpose=purpose) for purpose in ("gradients", "parameters", "norm")]
        ledger.clear()
        forward_only(replica, batches(width, world.rank, 1)[0][0])
        results[case] = Words(*step, ledger.words())
    return results


def forward_only(replica: Replica, x: Tensor) -> None:
    with torch.no_grad():
        for unit, layer in enumerate(replica.layers):
            replica.sync.enter_unit(unit, backward=False)
            x = layer(x)
            replica.sync.leave_unit(unit)
    replica.sync.release()


@pytest.fixture(scope="module")
def received(pool: Pool) -> dict[int, list[dict[tuple[object, ...], Words]]]:
    """By number of ranks, for each rank: one world serves all cases."""
    return {ranks: pool.run(words, ranks=ranks, timeout_s=20) for ranks in (3, 4)}


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("case", WORD_CASES, ids=str)
def test_words_are_those_of_the_formula(
    received: dict[int, list[dict[tuple[object, ...], Words]]], case: tuple[str, int | None, int, int], ranks: int
) -> None:
    """2(N−1)/N·Ψ whatever the accumulation; under stage 3, (N−1)/N·Ψ for each gather and for each micro-batch's
    gradients: each pass gathers everything but what the pass before left whole, which is the last unit, and between
    micro-batches the first."""
    kind, size, count, width = case
    if ranks % (size or ranks):
        assert case not in received[ranks][0], "groups divide the replicas"
        return
    psi, unit = UNITS * width**2, width**2
    shard = size or ranks
    padded = -(-unit // shard) * shard  # a unit, as it is divided
    assert width != 12 or padded == unit
    assert unit <= padded < unit + shard
    one_way = (shard - 1) / shard * UNITS * padded
    across = 2 * (ranks // shard - 1) / (ranks // shard) * psi / shard  # this part, over the groups
    gathered = {"allreduce": 0.0, "zero1": 1.0, "zero2": 1.0, "zero3": 2 * count - (2 * count - 1) / UNITS}[kind]
    sends = count if kind == "zero3" else 1
    expected = Words(
        gradients=2 * (ranks - 1) / ranks * psi if kind == "allreduce" else sends * one_way + across,
        parameters=gathered * one_way,
        norm=2 * (ranks - 1) / ranks,
        without_gradients=one_way if kind == "zero3" else 0.0,
    )
    for by_case in received[ranks]:
        assert tuple(by_case[case]) == pytest.approx(tuple(expected), rel=1e-12)
    if size is None and count == 1 and width == 12:
        total = expected.gradients + expected.parameters
        passes = 3 - 1 / UNITS if kind == "zero3" else 2
        assert total == pytest.approx(passes * (ranks - 1) / ranks * psi, rel=1e-12)


# ---- bytes


class Held(NamedTuple):
    """Live bytes; ``rest`` is all that is not a parameter, a main gradient or an optimizer state."""

    params: int
    grads: int
    states: int
    rest: int


def live(meter: Meter, sync: Sync) -> Held:
    meter.label("params", [tensor for flat in sync.flats for tensor in (flat.params, flat.own_params)])
    meter.label("grads", [tensor for flat in sync.flats for tensor in (flat.grads, flat.own_grads)])
    meter.label("states", [tensor for flat in sync.flats for tensor in flat.states.values()])
    named = [meter.live(category) for category in ("params", "grads", "states")]
    return Held(*named, meter.live() - sum(named))


def measure(world: World, width: int) -> dict[tuple[str, int], list[Held]]:
    """Under each kind, with one and with two micro-batches: before a step, the most in it, and after it; then the most
    in a forward pass without gradients, and after that."""
    results = {}
    for case in [(kind, count) for kind in KINDS for count in (1, 2)]:
        with Meter() as meter, pytest.MonkeyPatch.context() as patch:
            replica = Replica(world, square_model(UNITS, width, torch.float32), case[0], cap_bytes=1)
            most = before = live(meter, replica.sync)

            def opened(tensor: Tensor, meter: Meter = meter, sync: Sync = replica.sync) -> None:
                nonlocal most
                flat_module.open_(tensor)
                most = Held(*map(max, most, live(meter, sync)))

            patch.setattr(sync_module, "open_", opened)
            patch.setattr(visits_module, "open_", opened)
            replica.step(batches(width, world.rank, case[1], torch.float32))
            results[case] = [before, most, live(meter, replica.sync)]
            most = before
            forward_only(replica, batches(width, world.rank, 1, torch.float32)[0][0])
            results[case] += [most, live(meter, replica.sync)]
    return results


@pytest.mark.parametrize("width", [48, 47])
def test_bytes_are_those_of_the_formula(pool: Pool, width: int) -> None:
    """Of 4Ψ bytes of parameters, 4Ψ of gradients and 8Ψ of states (float32, AdamW), each stage divides one more. What
    is not kept is whole for two units of parameters; for all gradients while micro-batches add up under stage 2, else
    for no more than IN_FLIGHT + 1 buckets of them."""
    ranks, exact = 3, width**2 * BYTES
    unit = -(-(width**2) // ranks) * ranks * BYTES  # as it is divided
    assert unit == exact if width == 48 else exact < unit < exact + ranks * BYTES
    full, own = UNITS * unit, UNITS * unit // ranks
    undivided = UNITS * exact
    keeps = {
        "allreduce": (undivided, undivided, 2 * undivided), "zero1": (full, full, 2 * own),
        "zero2": (full, own, 2 * own), "zero3": (own, own, 2 * own),
    }  # fmt: skip
    for results in pool.run(measure, width, ranks=ranks, timeout_s=20):
        for (kind, count), (before, most, after, most_without, after_without) in results.items():
            params, grads, states = keeps[kind]
            for held in (before, after, after_without):
                assert held[:3] == keeps[kind]
                assert held.rest < exact / 2, "nothing else that grows with the model"
            assert most.params == most_without.params == params + (2 * unit if kind == "zero3" else 0)
            assert most.states == states
            assert most_without.grads == grads
            if grads == own:
                whole = most.grads - own
                assert whole == full if (kind, count) == ("zero2", 2) else unit <= whole <= (IN_FLIGHT + 1) * unit
            else:
                assert most.grads == grads
