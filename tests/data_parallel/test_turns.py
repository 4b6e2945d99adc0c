"""Gradients of two batches at a time, those that wait, and the order in which units go out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from replicas import by_hand, make
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.data_parallel.entry import Later
from shoal.data_parallel.sync import Sync
from shoal.local import lay_out
from shoal.mesh import Mesh
from shoal.model.linear import Linear
from shoal.tensor.whole import Whole
from shoal.train.pool import Pool

SHAPES = {"w0": (2, 3), "n0": (2,), "w1": (2, 3)}


# ---- what waits


def test_a_contribution_waits_while_there_is_a_place() -> None:
    later, made = Later(), []
    assert not later.keep(lambda: made.append(0))
    later.kept = kept = []
    assert later.keep(lambda: made.append(1))
    assert later.keep(lambda: made.append(2))
    later.kept = None
    assert not later.keep(lambda: made.append(3))
    assert (len(kept), made) == (2, [])
    for contribution in kept:
        contribution()
    assert made == [1, 2]


def test_what_is_on_its_way_enters_when_the_next_one_is_or_nothing_more_is_expected() -> None:
    later, made = Later(), []
    later.expect(lambda: made.append(0))
    assert made == []
    later.expect(lambda: made.append(1))
    assert made == [0]
    later.settle()
    later.settle()
    assert made == [0, 1]
    later.expect(lambda: made.append(2))
    later.forget()  # a step that failed
    later.settle()
    assert made == [0, 1]


def alone(kind: str = "allreduce", **options: Any) -> tuple[Sync, nn.Module, dict[str, nn.Parameter]]:
    """Two linears of one process, whose weights have sinks."""
    torch.manual_seed(0)
    module = nn.Sequential(Linear(3, 3), Linear(3, 2)).double()
    mesh = Mesh((("dp", 1),), World())
    layers = [(str(unit), layer) for unit, layer in enumerate(module)]
    held = lay_out(module, layers, {}, Whole(), mesh.grid, mesh.coords)
    return make(kind, held, mesh, **options), module, dict(module.named_parameters())


def taken(sync: Sync) -> dict[str, Tensor]:
    return {one.piece.name: one.tensor.clone() for one in sync.gradients()}


@pytest.mark.parametrize("options", [{"split_backward": True}, {"split_backward": True, "cap_bytes": 1}])
def test_a_weight_gradient_that_waited_is_the_one_that_is_made_at_once(options: Mapping[str, Any]) -> None:
    """And until then only what autograd makes is there."""
    found = []
    for waits in (False, True):
        sync, module, parameters = alone(**options)
        sync.begin()
        kept: list[Any] = []
        for number in range(2):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            if waits:
                sync.postpone(kept)
            module(x).square().sum().backward()
            sync.postpone(None)
            assert len(kept) == (2 * (number + 1) if waits else 0)
        if waits:
            assert parameters["0.weight"].grad is None
            with torch.no_grad():
                for contribution in kept:
                    contribution()
        sync.reduce(sync.units)
        sync.finish()
        found.append((taken(sync), sync.norm.find()))
    (plain, norm), (late, same) = found
    assert plain.keys() == late.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(torch.equal(plain[name], late[name]) for name in plain)
    assert norm == same


# ---- two batches


class Turning:
    """Three parameters of two units under a Sync that keeps versions, a replica a rank."""

    def __init__(self, world: World, kind: str) -> None:
        mesh = Mesh((("dp", world.size),), world)
        self.world, self.held = world, by_hand(mesh, SHAPES)
        self.sync = make(kind, list(self.held.values()), mesh, versions=True, cap_bytes=1)
        self.sync.begin()

    def batch(self, value: float) -> int:
        """The gradients of a batch enter and go out; returns their place."""
        for unit in (1, 0):
            for name in SHAPES:
                if int(name[-1]) == unit:
                    parameter = self.held[name].parameter
                    gradient = torch.full_like(parameter, value * (self.world.rank + 1))
                    parameter.main.add(gradient)  # type: ignore[attr-defined]
            self.sync.unit_done(unit, final=True)
        self.sync.reduce((1, 0))
        self.sync.depart()
        place = self.sync.filling
        self.sync.turn()
        return place

    def sums(self, place: int) -> set[float]:
        """All elements of the gradients of the batch at a place, summed over ranks."""
        with self.sync.view(place):
            return {value for one in self.sync.gradients() for value in one.tensor.flatten().tolist()}

    def finish(self, place: int) -> float:
        """The norm of a batch."""
        with self.sync.view(place):
            self.sync.finish()
        squares, pending = self.sync.norm.start()
        pending.wait()
        return squares.item() ** 0.5


def turns(world: World, kind: str) -> list[Any]:
    one = Turning(world, kind)
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    total = world.size * (world.size + 1) / 2
    found: list[Any] = []
    first = one.batch(1.0)
    found.append(one.finish(first) / (elements**0.5 * total))
    second = one.batch(10.0)
    found.append((first, second, one.sync.filling))
    # The batch after the next finds the first one's place again, once that has served.
    found.append(one.finish(second) / (10 * elements**0.5 * total))
    found.append([one.sums(first) == {total}, one.sums(second) == {10 * total}])
    with one.sync.view(first):
        one.sync.updated(aside=True)
    third = one.batch(100.0)
    found.append(third == first)
    found.append(one.finish(third) / (100 * elements**0.5 * total))
    found.append([one.sums(third) == {100 * total}, one.sums(second) == {10 * total}])
    return found


@pytest.mark.parametrize(("kind", "ranks"), [("allreduce", 1), ("allreduce", 2), ("zero1", 2), ("zero1", 3)])
def test_the_gradients_of_two_batches_stay_apart(kind: str, ranks: int, pool: Pool) -> None:
    """One kept or summed while the next adds up; their norms too."""
    for first, places, second, both, again, third, last in pool.run(turns, kind, ranks=ranks):
        assert [first, second, third] == pytest.approx([1, 1, 1], rel=1e-12)
        assert places == (0, 1, 0)
        assert both == last == [True, True]
        assert again


def test_a_view_of_what_is_filled_already_changes_nothing() -> None:
    sync, _, _ = alone(versions=True, split_backward=True)
    grads = [flat.grads for flat in sync.flats]
    with sync.view(sync.filling):
        assert all(flat.grads is one for flat, one in zip(sync.flats, grads, strict=True))
    with sync.view(1 - sync.filling):
        pass
    assert all(flat.grads is one for flat, one in zip(sync.flats, grads, strict=True))


def skipped(world: World, kind: str) -> list[list[float]]:
    """The parameters of the model while the optimizer's copies have moved on: after a step that is skipped, and after
    one that is not."""
    one = Turning(world, kind)
    found = []
    for was in (True, False):
        for run in one.sync.runs():
            run.params.add_(1.0)
        one.sync.updated(skipped=was)
        found.append(sorted({value for each in one.held.values() for value in each.parameter.flatten().tolist()}))
    return found


@pytest.mark.parametrize(("kind", "ranks"), [("allreduce", 1), ("zero1", 2)])
def test_a_step_that_is_skipped_writes_to_no_parameter(kind: str, ranks: int, pool: Pool) -> None:
    assert pool.run(skipped, kind, ranks=ranks) == [[[0.0], [2.0]]] * ranks


# ---- what stages share, and order


def departing(world: World, kind: str) -> list[Any]:
    """How many sums between two stages have begun, and their gradients, of two batches one after the other."""
    a, b = nn.Linear(3, 2, bias=False, dtype=torch.float64), nn.Linear(3, 2, bias=False, dtype=torch.float64)
    model, mesh = nn.Sequential(a, b, b, a), Mesh((("pp", 2), ("dp", 1)), world)
    layers = [(str(unit), layer) for unit, layer in enumerate(model)]
    held = lay_out(model, layers, {}, Whole(), mesh.grid, mesh.coords, (range(2), range(2, 4)))
    sync = make(kind, held, mesh, cap_bytes=1, versions=True)
    begun: list[int] = []
    start = sync._start_cross
    sync._start_cross = lambda number: (begun.append(number), start(number))[1]  # type: ignore[method-assign]
    sync.begin()
    found: list[Any] = []
    for factor in (1.0, 2.0):
        begun.clear()
        counts = []
        for one in sorted(held, key=lambda one: -one.unit):
            value = factor * 10.0 ** (2 * world.rank + (one.parameter is b.weight))
            one.parameter.main.add(torch.full_like(one.parameter, value))  # type: ignore[attr-defined]
            sync.unit_done(one.unit, final=True)
        sync.reduce(sync.units)
        counts.append(len(begun))
        sync.depart()
        counts.append(len(begun))
        sync.depart()
        place = sync.filling
        sync.turn()
        with sync.view(place):
            sync.finish()
            sums = {one.piece.name: set(one.tensor.flatten().tolist()) for one in sync.gradients()}
        counts.append(len(begun))
        found.append((counts, sums))
    return found


@pytest.mark.parametrize("kind", ["allreduce", "zero1"])
def test_what_stages_share_departs_once_a_batch_and_is_summed_aside(kind: str, pool: Pool) -> None:
    """Not before it is told to: the other stage may be far from having sent its own."""
    for found in pool.run(departing, kind, ranks=2, timeout_s=20):
        assert found == [
            ([0, 2, 2], {"0.weight": {101 * factor}, "1.weight": {1010 * factor}}) for factor in (1.0, 2.0)
        ]


def units(world: World) -> tuple[tuple[int, ...], list[int]]:
    """The order of a Sync's units, and of the buckets that go out when all reduce at once."""
    one = Turning(world, "allreduce")
    sent: list[int] = []
    send = one.sync._send
    one.sync._send = lambda number: (sent.append(number), send(number))[1]  # type: ignore[method-assign]
    one.sync.reduce(one.sync.units)
    return one.sync.units, [max(one.sync.flats[number].bucket.units) for number in sent]


def test_units_go_out_last_first_on_all_ranks_alike(pool: Pool) -> None:
    """As a backward pass completes them."""
    assert pool.run(units, ranks=2) == [((1, 0), [1, 0])] * 2
