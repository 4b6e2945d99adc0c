"""What parameter servers cost, and when their answers arrive. (That they compute what one process does is tested with
every other way of keeping replicas equal.)"""

from __future__ import annotations

import pytest
import torch
from replicas import Replica, batch, found, one_process, square_model

from shoal.comm.world import World
from shoal.data_parallel.server import Server
from shoal.errors import ConfigError
from shoal.meter import Meter
from shoal.train.pool import Pool

UNITS = 7
BYTES = 4  # of a float32


def received(world: World, servers: int, width: int, count: int) -> tuple[float, float]:
    """Words of gradients and of parameters in a step of ``count`` micro-batches."""
    replica = Replica(world, square_model(UNITS, width), "server", size=servers, cap_bytes=1)
    world.ledger.clear()
    replica.step([batch(0, world.rank, number, wide=width, out=width) for number in range(count)])
    replica.sync.settle()
    return world.ledger.words(purpose="gradients"), world.ledger.words(purpose="parameters")


@pytest.mark.parametrize("width", [12, 5])
@pytest.mark.parametrize(("ranks", "servers"), [(2, 1), (3, 1), (3, 2), (4, 2), (4, 4)])
def test_words_are_those_of_the_formula(pool: Pool, ranks: int, servers: int, width: int) -> None:
    """A server receives (W−1)·Ψ/N of gradients and (N−1)/N·Ψ of parameters, another rank Ψ of parameters, however many
    micro-batches add up; between all of them as many as in an all-reduce. A unit is padded to a multiple of N."""
    psi = UNITS * -(-(width**2) // servers) * servers
    serves = ((ranks - 1) * psi / servers, (servers - 1) * psi / servers)
    by_rank = pool.run(received, servers, width, 2, ranks=ranks)
    assert by_rank == [pytest.approx(serves)] * servers + [pytest.approx((0, psi))] * (ranks - servers)
    assert sum(map(sum, by_rank)) == pytest.approx(ranks * 2 * (ranks - 1) / ranks * psi)


def held(world: World, servers: int, width: int) -> list[int]:
    """Bytes of parameters, gradients and states after a step, and of whatever is beside them."""
    with Meter() as meter:
        replica = Replica(world, square_model(UNITS, width, torch.float32), "server", size=servers, cap_bytes=1)
        x, target = batch(0, world.rank, 0, wide=width, out=width)
        replica.step([(x.float(), target.float())])
        replica.sync.settle()
        del x, target
        flats = replica.sync.flats
        meter.label("params", [tensor for flat in flats for tensor in (flat.params, flat.own_params)])
        meter.label("grads", [tensor for flat in flats for tensor in (flat.grads, flat.own_grads)])
        meter.label("states", [tensor for flat in flats for tensor in flat.states.values()])
        named = [meter.live(category) for category in ("params", "grads", "states")]
        return [*named, meter.live() - sum(named)]


def test_only_servers_hold_optimizer_states(pool: Pool) -> None:
    """4Ψ of parameters, 4Ψ of gradients, and on each server 8Ψ/N of AdamW's states (float32)."""
    psi = UNITS * 48**2 * BYTES
    for rank, (params, grads, states, rest) in enumerate(pool.run(held, 2, 48, ranks=3)):
        assert (params, grads) == (psi, psi)
        assert states == (psi if rank < 2 else 0)
        assert rest < psi / 10


def arriving(world: World) -> tuple[list[int], str, bool]:
    """How many buckets are under way after the update, after each unit is entered; what a write meanwhile says; and
    whether the parameters are right once the last has been entered."""
    model = square_model(3, 4)
    replica = Replica(world, model, "server", cap_bytes=1)
    sync = replica.sync
    assert isinstance(sync, Server)
    steps = [[batch(step, 0, 0, wide=4, out=4)] for step in range(2)]
    for given in steps:
        replica.sync.begin()
        replica.passes(*given[0], final=True)
        replica.reduce()
        replica.update()
    counts = [len(sync._coming)]
    for unit in range(3):
        sync.enter_unit(unit, backward=False)
        counts.append(len(sync._coming))
    both = [[each for each in given for _ in range(world.size)] for given in steps]
    (_, (values, _)) = one_process(square_model(3, 4), both)
    right = all(torch.allclose(values["weight", name], one) for name, one in model.named_parameters())
    sync.published()
    with torch.no_grad():
        next(iter(model.parameters())).add_(0.0)
    said = ""
    try:
        sync.check()
    except ConfigError as error:
        said = str(error)
    return counts, said, right


def test_a_unit_waits_for_its_own_parameters_alone(pool: Pool) -> None:
    server, other = pool.run(arriving, ranks=2)
    assert server == ([0, 0, 0, 0], "", True)
    counts, said, right = other
    assert (counts, right) == ([3, 2, 1, 0], True)
    assert "was written to while steps are under way" in said


def kept_apart(world: World) -> list[tuple[str, bool]]:
    """With steps pushed before the one before has been finished: sums by step, in the order of steps."""
    replica = Replica(world, square_model(2, 3), "server", stale=1)
    sync, sums = replica.sync, []
    assert isinstance(sync, Server)
    for step in range(3):
        sync.begin()
        replica.passes(*batch(step, world.rank, 0, wide=3, out=3), final=True)
        sync.reduce(sync.units)
        if step:
            sync.finish()
            sums.append({one.name: torch.as_tensor(one.values) for one in found(sync.gradients())})
    both = [[batch(step, rank, 0, wide=3, out=3) for rank in range(world.size)] for step in range(2)]
    seen = []
    for step, given in enumerate(both):
        ((values, _),) = one_process(square_model(2, 3), [given])
        seen += [(name, torch.allclose(values["gradient", name], one)) for name, one in sums[step].items()]
    return seen


def test_a_step_that_is_pushed_early_leaves_the_one_before_alone(pool: Pool) -> None:
    server, other = pool.run(kept_apart, ranks=2)
    assert sorted(server) == [("0.weight", True)] * 2 + [("1.weight", True)] * 2
    assert other == []
