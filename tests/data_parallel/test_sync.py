"""How gradients come in, in which order buckets go out, and who sums what."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import pytest
import torch
from replicas import KINDS, Found, assembled, by_hand, found, make
from torch import nn

from shoal.comm.world import World
from shoal.data_parallel import buckets
from shoal.data_parallel.sync import Sync
from shoal.errors import ConfigError
from shoal.local import LocalParameter, lay_out
from shoal.mesh import Mesh
from shoal.placement import Piece, Placement, Rule, holders, whole
from shoal.tensor.whole import Whole
from shoal.train.pool import Pool

UNITS = 3
SHAPES = {name: shape for u in range(UNITS) for name, shape in ((f"w{u}", (2, 3)), (f"n{u}", (2,)))}


def watched(sync: Sync) -> list[int]:
    """The numbers of the buckets that are sent from now on."""
    sent: list[int] = []
    send = sync._send

    def noted(number: int, **options: bool) -> None:
        if options.get("last", True):
            sent.append(number)
        send(number, **options)

    sync._send = noted  # type: ignore[method-assign]
    return sent


class Replica:
    """Three units of a matrix and a vector (64 bytes each), and the buckets that were sent, in that order."""

    def __init__(self, world: World, kind: str, cap_bytes: int = 1, resident: bool = False) -> None:
        mesh = Mesh((("dp", world.size),), world)
        self.held = by_hand(mesh, SHAPES)
        self.sync = make(kind, list(self.held.values()), mesh, cap_bytes=cap_bytes, resident=resident)
        self.sent = watched(self.sync)
        self.sync.begin()

    def leave(self, **gradients: float) -> None:
        """What autograd leaves in ``.grad``: a new gradient, or an addition to the one that is there."""
        for name, value in gradients.items():
            parameter = self.held[name].parameter
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, value)
            else:
                parameter.grad += value

    def backward(self, unit: int, final: bool, **gradients: float) -> None:
        self.leave(**gradients)
        self.sync.unit_done(unit, final)

    def product(self, name: str, value: float) -> None:
        """What a linear map leaves: the factors of a gradient that is ``value`` in every element."""
        weight = self.held[name].parameter
        weight.sink.add_product(torch.full((2, 2), value / 2).double(), torch.ones(2, 3).double())  # type: ignore

    def end(self) -> list[Found]:
        """Finish the step and start the next; returns the gradients."""
        self.sync.reduce(self.sync.units)
        self.sync.finish()
        gradients = found(self.sync.gradients())
        self.sync.updated()
        self.sync.begin()
        return gradients


def values(*by_rank: list[Found]) -> dict[str, float]:
    """The value that every element of a gradient has."""
    full = assembled(by_rank)
    assert all((tensor == tensor.flatten()[0]).all() for tensor in full.values())
    return {name: tensor.flatten()[0].item() for (_, name), tensor in full.items()}


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers also where nobody else has a part in the gradients."""
    monkeypatch.setattr(buckets, "_alone", lambda divisions: False)


def alone(kind: str, cap_bytes: int = 1) -> Replica:
    return Replica(World(), kind, cap_bytes)


ZEROS = dict.fromkeys(SHAPES, 0.0)


# ---- the way in


@pytest.mark.usefixtures("buffered")
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_contribution_of_a_step_overwrites_and_later_ones_add(kind: str) -> None:
    """By products, by autograd and by both, in any order; what no micro-batch used is zero."""
    replica = alone(kind)
    for flat in replica.sync.flats:
        flat.grads.fill_(float("nan"))
    for value in (1.0, 10.0):  # two steps
        replica.product("w2", value)  # a product alone
        replica.backward(2, False)
        replica.leave(w1=value)  # both, the product in the middle
        replica.product("w1", 2 * value)
        replica.backward(1, False)
        replica.backward(0, False, n0=value)  # autograd alone
        replica.product("w2", 3 * value)
        replica.backward(2, True, w2=5 * value)
        replica.product("w1", 4 * value)
        replica.backward(1, True, w1=8 * value, n1=value)  # n1 for the first time
        replica.backward(0, True, n0=value)
        assert values(replica.end()) == ZEROS | {"w2": 9 * value, "w1": 15 * value, "n1": value, "n0": 2 * value}
        assert all(one.parameter.grad is None for one in replica.held.values())


@pytest.mark.usefixtures("buffered")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_comes_after_its_unit_was_done_is_counted_or_found(kind: str) -> None:
    """It is counted while the main gradient can still take it; else it is an error, never lost."""
    replica = alone(kind)
    replica.backward(1, False, w1=1.0)
    replica.leave(w1=2.0, n1=4.0)  # before the next micro-batch
    replica.product("w1", 8.0)
    for unit in (1, 0):
        replica.backward(unit, True)
    assert values(replica.end()) == ZEROS | {"w1": 11.0, "n1": 4.0}
    replica.backward(1, True, w1=1.0)
    replica.leave(w1=1.0)
    with pytest.raises(ConfigError, match="w1 came after its unit was done"):
        replica.sync.reduce(replica.sync.units)
    replica.sync.begin()
    assert values(replica.end()) == ZEROS


@pytest.mark.usefixtures("buffered")
@pytest.mark.parametrize("late", ["gradient", "late gradient", "product"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_comes_after_its_bucket_was_sent_is_an_error_until_the_next_step(kind: str, late: str) -> None:
    replica = alone(kind)
    replica.backward(2, True, w2=1.0)
    replica.backward(1, False, w1=1.0)
    assert replica.sent == [0]
    if late == "product":
        with pytest.raises(ConfigError, match="w2 came after its unit was done"):
            replica.product("w2", 1.0)
    elif late == "gradient":
        with pytest.raises(ConfigError, match="w2 came after its unit was done"):
            replica.backward(2, True, w2=1.0)
    else:
        replica.leave(w2=1.0)
        with pytest.raises(ConfigError, match="w2 came after its unit was done"):
            replica.sync.reduce(replica.sync.units)
    replica.sync.begin()
    replica.backward(2, True, w2=5.0)
    assert values(replica.end()) == ZEROS | {"w2": 5.0}


@pytest.mark.parametrize("kind", KINDS)
def test_where_nobody_shares_a_gradient_it_stays_where_autograd_made_it(kind: str) -> None:
    replica = alone(kind)
    assert not any(flat.grads.numel() for flat in replica.sync.flats)
    for value in (1.0, 10.0):  # two steps
        replica.backward(2, False, w2=value)
        made = replica.held["w2"].parameter.grad
        replica.backward(1, False, w1=value)
        replica.backward(0, False)
        replica.backward(2, True, w2=2 * value)
        assert replica.sent[-1:] == [0]
        replica.backward(1, True, n1=value)
        replica.backward(0, True)
        assert all(one.parameter.grad is None for one in replica.held.values())
        (run,) = (run for run in replica.sync.runs() if run.grads().data_ptr() == made.data_ptr())
        assert values(replica.end()) == ZEROS | {"w2": 3 * value, "w1": value, "n1": value}
        assert run.grads().numel() == 0, "gone with the update"


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_ones_own_that_comes_late_is_an_error_until_the_next_step(kind: str) -> None:
    replica = alone(kind)
    replica.backward(2, True, w2=1.0)
    replica.leave(w2=1.0)
    with pytest.raises(ConfigError, match="w2 came after its unit was done"):
        replica.sync.reduce(replica.sync.units)
    replica.sync.begin()
    replica.backward(2, True, w2=5.0)
    assert values(replica.end()) == ZEROS | {"w2": 5.0}


# ---- the order of going out


@pytest.mark.usefixtures("buffered")
@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_waits_for_all_of_its_units_and_for_the_last_micro_batch(kind: str) -> None:
    replica = alone(kind, cap_bytes=128)
    together = kind != "zero3"  # whose buckets are always single units
    for unit in (2, 1, 0):
        replica.backward(unit, False, **{f"w{unit}": 1.0})
    assert replica.sent == []
    for unit, sent in {2: ([0], []), 1: ([0, 1], [0]), 0: ([0, 1, 2], [0, 1])}.items():
        replica.backward(unit, True, **{f"w{unit}": 1.0})
        assert replica.sent == sent[together]
    assert values(replica.end()) == ZEROS | {f"w{unit}": 2.0 for unit in range(UNITS)}


def uneven(world: World, kind: str) -> list[tuple[list[int], list[int], list[Found], float]]:
    """Two steps of two micro-batches. Rank 1 uses none of unit 2 and half of unit 1."""
    replica, results = Replica(world, kind, resident=True), []
    for step in range(2):
        replica.sent.clear()
        value = (world.rank + 1) * 10.0**step
        for last in (False, True):
            for unit, names in {2: ("w2", "n2"), 1: ("w1", "n1"), 0: ("w0", "n0")}.items():
                used = [name for name in names if world.rank == 0 or name in ("w1", "w0", "n0")]
                replica.backward(unit, last, **dict.fromkeys(used, value))
        early = list(replica.sent)
        gradients = replica.end()
        results.append((early, list(replica.sent), gradients, world.ledger.words("dp", "gradients")))
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_use_different_parameters_send_the_same_buckets_and_agree(pool: Pool, kind: str) -> None:
    """What a rank did not use counts as zero. The words are those of one exchange a step."""
    expected = {"w2": 2.0, "n2": 2.0, "w1": 6.0, "n1": 2.0, "w0": 6.0, "n0": 6.0}
    by_rank = pool.run(uneven, kind, ranks=2, timeout_s=20)
    for step, results in enumerate(zip(*by_rank, strict=True)):
        assert [early for early, *_ in results] == [[0, 1, 2]] * 2
        assert [sent for _, sent, *_ in results] == [[0, 1, 2]] * 2
        assert values(*(gradients for _, _, gradients, _ in results)) == {n: v * 10**step for n, v in expected.items()}
        passes = 2 if kind == "allreduce" else 1
        received = [words for *_, words in results]
        assert sum(received) == (step + 1) * passes * 8 * UNITS
        assert received[1] == (0 if kind == "server" else received[0])


# ---- who sums what


def one_of(mesh: Mesh, unit: int, rule: Rule) -> LocalParameter:
    """The parameter that ``rule`` places here, zeros, named after its first piece."""
    placement = rule.at(mesh.coords)
    assert placement is not None
    parameter = nn.Parameter(torch.zeros(placement.shape, dtype=torch.float64))
    who = holders(rule, mesh.grid, mesh.coords)
    return LocalParameter(placement.pieces[0].name, parameter, (unit,), placement, who)


def on_stages(mesh: Mesh, name: str, shape: tuple[int, ...], *stages: int) -> Rule:
    return Rule(lambda at: whole(name, shape) if at["pp"] in stages else None, frozenset({"pp"}))


def staged(mesh: Mesh) -> list[LocalParameter]:
    """A parameter on both stages, in the first's first unit and the second's last, and one on each stage alone."""
    stage = mesh.coords["pp"]
    tied = one_of(mesh, 3 * stage, on_stages(mesh, "tied", (3, 3), 0, 1))
    return [tied, one_of(mesh, 1 + stage, on_stages(mesh, f"own{stage}", (2, 3), stage))]


def cut(mesh: Mesh) -> list[LocalParameter]:
    """Query rows divided over tp in one matrix with key rows that all have, matrices of divided rows, and a norm whose
    work is duplicated."""

    def rows(name: str, count: int, at: Mapping[str, int]) -> Piece:
        start = count * at["tp"]
        return Piece(name, (2 * count, 3), ((start, start + count), (0, 3)), ((0, count), (0, 3)))

    def fused(at: Mapping[str, int]) -> Placement:
        key = Piece("key", (1, 3), ((0, 1), (0, 3)), ((2, 3), (0, 3)))
        return Placement((3, 3), (rows("query", 2, at), key))

    tp = frozenset({"tp"})
    norm = Placement((5,), whole("norm", (5,)).pieces, tp)
    return [
        one_of(mesh, 1, Rule(fused, tp)),
        one_of(mesh, 1, Rule(lambda at: Placement((1, 3), (rows("one", 1, at),)), tp)),
        one_of(mesh, 1, Rule(lambda _: norm, tp)),
        one_of(mesh, 0, Rule(lambda at: Placement((3, 3), (rows("three", 3, at),)), tp)),
    ]


COMPANIES = {"pp": staged, "tp": cut}
AXES = {"pp": (("pp", 2), ("dp", 2)), "tp": (("dp", 2), ("tp", 2))}
SUMS = {
    "pp": {"tied": [1111] * 3, "own0": [11] * 2, "own1": [1100] * 2},
    "tp": {
        "query": [101, 101, 1010, 1010], "key": [1111], "one": [101, 1010],
        "three": [101, 101, 101, 1010, 1010, 1010], "norm": [101] * 5,
    },
}  # fmt: skip
"""What each row of a gradient should be when that of rank r is 10^r."""


def companies(world: World, axis: str) -> dict[str, tuple[list[Found], float]]:
    """Gradients and norm under each kind. Where work is duplicated, so is the gradient."""
    results = {}
    for kind in KINDS:
        mesh = Mesh(AXES[axis], world)
        held = COMPANIES[axis](mesh)
        sync = make(kind, held, mesh)
        sync.begin()
        for one in held:
            worker = mesh.grid.rank({**mesh.coords, **dict.fromkeys(one.placement.duplicated, 0)})
            one.parameter.grad = torch.full_like(one.parameter, 10.0**worker)
        for unit in sorted({one.unit for one in held}, reverse=True):
            sync.unit_done(unit, final=True)
        sync.reduce(sync.units)
        sync.finish()
        results[kind] = found(sync.gradients()), sync.norm.find()
    return results


@pytest.mark.parametrize("axis", COMPANIES)
def test_each_element_is_summed_by_those_who_hold_it_and_counts_once_in_the_norm(pool: Pool, axis: str) -> None:
    by_rank = pool.run(companies, axis, timeout_s=20)
    for kind in KINDS:
        full = assembled([results[kind][0] for results in by_rank])
        rows = {name: tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None] for (_, name), tensor in full.items()}
        assert {name: row.amin(1).tolist() for name, row in rows.items()} == SUMS[axis]
        assert {name: row.amax(1).tolist() for name, row in rows.items()} == SUMS[axis]
        norm = sqrt(sum(tensor.square().sum().item() for tensor in full.values()))
        assert [results[kind][1] for results in by_rank] == pytest.approx([norm] * 4, rel=1e-14)


def crossed(world: World, kind: str, cap_bytes: int) -> list[Found]:
    """Two layers on both stages, in opposite orders: a, b on the first, b, a on the second."""
    a, b = nn.Linear(3, 2, bias=False, dtype=torch.float64), nn.Linear(3, 2, bias=False, dtype=torch.float64)
    model, mesh = nn.Sequential(a, b, b, a), Mesh((("pp", 2), ("dp", 1)), world)
    layers = [(str(unit), layer) for unit, layer in enumerate(model)]
    held = lay_out(model, layers, {}, Whole(), mesh.grid, mesh.coords, (range(2), range(2, 4)))
    sync = make(kind, held, mesh, cap_bytes=cap_bytes)
    sync.begin()
    for one in sorted(held, key=lambda one: -one.unit):
        one.parameter.grad = torch.full_like(one.parameter, 10.0 ** (2 * world.rank + (one.parameter is b.weight)))
        sync.unit_done(one.unit, final=True)
    sync.reduce(sync.units)
    sync.finish()
    return found(sync.gradients())


@pytest.mark.parametrize("cap_bytes", [1, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_what_two_stages_share_is_summed_whatever_its_order_on_each(pool: Pool, kind: str, cap_bytes: int) -> None:
    assert values(*pool.run(crossed, kind, cap_bytes, ranks=2, timeout_s=20)) == {"0.weight": 101, "1.weight": 1010}
