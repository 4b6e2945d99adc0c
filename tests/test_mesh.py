from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.collectives import all_reduce
from shoal.comm.world import World
from shoal.mesh import Grid, Mesh
from shoal.train.pool import Pool

GRIDS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: Grid(tuple(zip(("pp", "dp", "cp", "tp"), sizes, strict=False)))
)
SQUARE = (("dp", 2), ("tp", 2))


@given(GRIDS, st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_ranks_and_coordinates_are_one_to_one_with_the_last_axis_fastest(grid: Grid, data: st.DataObject) -> None:
    places = [grid.coords(rank) for rank in range(grid.size)]
    assert [grid.rank(place) for place in places] == list(range(grid.size))
    assert [tuple(place.values()) for place in places] == sorted(tuple(place.values()) for place in places)
    over = data.draw(st.sets(st.sampled_from(grid.names)))
    coords = places[data.draw(st.integers(0, grid.size - 1))]
    varied = [grid.rank(place) for place in grid.vary(coords, over)]
    fixed = [axis for axis in grid.names if axis not in over]
    assert varied == [r for r, place in enumerate(places) if all(place[axis] == coords[axis] for axis in fixed)]


def test_a_label_names_exactly_the_axes_on_which_ranks_differ() -> None:
    grid = Grid((("pp", 2), ("dp", 2), ("tp", 2)))
    assert grid.label([5]) == "none"
    assert grid.label([4, 5]) == "tp"
    assert grid.label([1, 3]) == "dp"
    assert grid.label([0, 6]) == "pp·dp", "two corners of a plane differ on both its axes"


def sums_over_axes(world: World) -> dict[str, tuple[str, float]]:
    mesh = Mesh(SQUARE, world)
    found = {}
    for axes in (("dp",), ("tp",), ("dp", "tp"), ()):
        ones = torch.tensor([10.0**world.rank])
        all_reduce(ones, mesh.over(*axes), "test")
        found["+".join(axes)] = (mesh.over(*axes).axis, ones.item())
    return found


def test_a_group_over_axes_sums_the_ranks_that_differ_on_them_alone(pool: Pool) -> None:
    by_rank = pool.run(sums_over_axes)
    assert [found["tp"] for found in by_rank] == [("tp", 11.0)] * 2 + [("tp", 1100.0)] * 2
    assert [found["dp"] for found in by_rank] == [("dp", 101.0), ("dp", 1010.0)] * 2
    assert [found["dp+tp"] for found in by_rank] == [("dp·tp", 1111.0)] * 4
    assert [found[""] for found in by_rank] == [("none", 10.0**rank) for rank in range(4)]


def channels(world: World) -> tuple[str, str, bool]:
    mesh = Mesh(SQUARE, world)
    plain, other = mesh.over("tp"), mesh.over("tp", channel="other")
    return other.axis, other.channel, other.ranks == plain.ranks and other.backend is not plain.backend


def test_a_group_over_axes_may_have_a_channel_of_its_own(pool: Pool) -> None:
    assert pool.run(channels) == [("tp", "other", True)] * 4


def chain(world: World) -> list[float]:
    """Overlapping pairs 0-1, 1-2, 2-3 and the outer 0-3, asked for in another order by each rank."""
    mesh = Mesh(SQUARE, world)
    pairs = [pair for pair in ((0, 1), (1, 2), (2, 3), (0, 3)) if world.rank in pair]
    mesh.open_groups(pairs[:: 1 if world.rank % 2 else -1])
    found = []
    for pair in sorted(pairs):
        ones = torch.tensor([10.0**world.rank])
        all_reduce(ones, mesh.group(pair), "test")
        found.append(ones.item())
    return found


def test_overlapping_groups_can_be_opened_whatever_order_each_rank_names_them_in(pool: Pool) -> None:
    assert pool.run(chain, timeout_s=2) == [[11, 1001], [11, 110], [110, 1100], [1001, 1100]]
