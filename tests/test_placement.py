from __future__ import annotations

from collections.abc import Mapping
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.mesh import Coords, Grid
from shoal.placement import (
    Census,
    Division,
    Holders,
    Piece,
    Placement,
    Rule,
    assemble,
    divide,
    flat_boxes,
    holders,
    serve,
    stacked,
    whole,
)

GRID = Grid((("pp", 2), ("dp", 2), ("tp", 4)))


def rows(name: str, start: int, stop: int, duplicated: frozenset[str] = frozenset()) -> Placement:
    box, at = ((start, stop), (0, 3)), ((0, stop - start), (0, 3))
    return Placement((stop - start, 3), (Piece(name, (8, 3), box, at),), duplicated)


def of(rule: Rule, rank: int = 0, grid: Grid = GRID) -> Holders:
    (found,) = holders(rule, grid, grid.coords(rank))
    return found


def test_a_tensor_placed_alike_everywhere_is_summed_by_all() -> None:
    everyone = tuple(range(16))
    assert of(Rule(lambda _: whole("w", (8, 3)))) == Holders(everyone, everyone)


def test_a_split_tensor_is_summed_by_the_ranks_with_the_same_part() -> None:
    rule = Rule(lambda at: rows("w", 2 * at["tp"], 2 * at["tp"] + 2), frozenset({"tp"}))
    assert of(rule, rank=5) == Holders((1, 5, 9, 13), (1, 5, 9, 13))


def test_a_replicated_key_value_head_is_summed_with_its_replica() -> None:
    """Two heads on four ranks: neighbours hold the same one, and each did its own share of the work."""
    rule = Rule(lambda at: rows("kv", at["tp"] // 2 * 4, at["tp"] // 2 * 4 + 4), frozenset({"tp"}))
    assert of(rule, rank=2).summing == (2, 3, 6, 7, 10, 11, 14, 15)


def test_duplicated_work_is_held_by_all_but_summed_on_the_other_axes_only() -> None:
    placement = Placement((8, 3), whole("norm", (8, 3)).pieces, frozenset({"tp"}))
    found = of(Rule(lambda _: placement), rank=6)
    assert found.copies == tuple(range(16))
    assert found.summing == (2, 6, 10, 14)


def test_a_tied_weight_on_the_first_and_last_stage_is_summed_across_them() -> None:
    grid = Grid((("pp", 4), ("dp", 2)))
    rule = Rule(lambda at: whole("embed", (8, 3)) if at["pp"] in (0, 3) else None, frozenset({"pp"}))
    assert of(rule, rank=7, grid=grid).summing == (0, 1, 6, 7)
    with pytest.raises(AssertionError, match="what it holds"):
        holders(rule, grid, grid.coords(2))


def test_each_piece_of_a_fused_tensor_has_its_own_holders() -> None:
    """Query rows are split over tp, key rows are not."""

    def at(coords: Mapping[str, int]) -> Placement:
        q = rows("q", 2 * coords["tp"], 2 * coords["tp"] + 2).pieces[0]
        return Placement((10, 3), (q, Piece("k", (8, 3), ((0, 8), (0, 3)), ((2, 10), (0, 3)))))

    q, k = holders(Rule(at, frozenset({"tp"})), GRID, GRID.coords(0))
    assert q.copies == (0, 4, 8, 12)
    assert k.copies == tuple(range(16))


@given(st.lists(st.integers(0, 2), min_size=8, max_size=8), st.sets(st.sampled_from(["pp", "dp", "tp"])))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_holders_are_the_ranks_that_a_search_of_the_whole_world_finds(parts: list[int], again: set[str]) -> None:
    """Any assignment of parts (0: nothing) to the ranks of a cube, with any axes duplicated."""
    grid = Grid((("pp", 2), ("dp", 2), ("tp", 2)))

    def at(coords: Mapping[str, int]) -> Placement | None:
        part = parts[grid.rank(coords)]
        return rows("w", 4 * part - 4, 4 * part, frozenset(again)) if part else None

    rule = Rule(at, frozenset(grid.names))
    for rank in [rank for rank in range(8) if parts[rank]]:
        copy = [r for r in range(8) if parts[r] == parts[rank]]
        adding = [r for r in copy if all(grid.coords(r)[axis] == grid.coords(rank)[axis] for axis in again)]
        assert of(rule, rank, grid) == Holders(tuple(copy), tuple(adding))


def test_deriving_holders_asks_only_about_the_axes_that_the_rule_reads() -> None:
    asked = []
    grid = Grid((("pp", 16), ("dp", 64), ("tp", 2)))

    def at(coords: Mapping[str, int]) -> Placement:
        asked.append(coords)
        return rows("w", 4 * coords["tp"], 4 * coords["tp"] + 4)

    assert len(of(Rule(at, frozenset({"tp"})), grid=grid).copies) == 1024
    assert len(asked) == 1 + 2, "its own place, and one for each coordinate on tp: not 2,048"


def everywhere(name: str, *duplicated: str) -> Rule:
    return Rule(lambda _: Placement((8, 3), whole(name, (8, 3)).pieces, frozenset(duplicated)))


TIED = Rule(lambda at: whole("tied", (8, 3)) if at["pp"] in (0, 2) else None, frozenset({"pp"}))
KEYS = Rule(lambda at: rows("kv", at["tp"] // 2 * 4, at["tp"] // 2 * 4 + 4), frozenset({"tp"}))


@pytest.mark.parametrize(
    ("axes", "rule", "rank", "size", "expected"),
    [
        ({"dp": 4}, everywhere("w"), 2, 4, Division((0, 1, 2, 3), 2, (2,), (2,))),
        ({"dp": 4}, everywhere("w"), 2, 9, Division((0, 1, 2, 3), 2, (2,), (2,))),
        ({"dp": 4}, everywhere("w"), 2, 2, Division((2, 3), 0, (0, 2), (0, 2))),
        ({"dp": 4}, everywhere("w"), 2, 1, Division((2,), 0, (0, 1, 2, 3), (0, 1, 2, 3))),
        ({"dp": 2, "cp": 2, "tp": 2}, everywhere("w"), 5, 4, Division((1, 3, 5, 7), 2, (4, 5), (4, 5))),
        ({"dp": 2, "cp": 2}, everywhere("w"), 3, 2, Division((2, 3), 1, (1, 3), (1, 3))),
        # Work that is duplicated on tp: the copies there hold the same part, and have its sum already.
        ({"dp": 2, "tp": 2}, everywhere("w", "tp"), 3, 2, Division((1, 3), 1, (3,), (2, 3))),
        ({"dp": 4, "tp": 2}, everywhere("w", "tp"), 5, 2, Division((5, 7), 0, (1, 5), (0, 1, 4, 5))),
        # On two stages: divided inside one, summed across both.
        ({"pp": 3, "dp": 2}, TIED, 5, 2, Division((4, 5), 1, (1, 5), (1, 5), across_stages=True)),
        ({"pp": 3, "dp": 2}, TIED, 5, 4, Division((4, 5), 1, (1, 5), (1, 5), across_stages=True)),
        ({"pp": 3, "dp": 2}, TIED, 0, 1, Division((0,), 0, (0, 1, 4, 5), (0, 1, 4, 5), across_stages=True)),
        # A key/value head that neighbours on tp both have, each with its own share of the work.
        ({"dp": 2, "tp": 4}, KEYS, 6, 2, Division((2, 6), 1, (6, 7), (6, 7))),
    ],
)
def test_a_division_is_over_ranks_in_lockstep_and_summed_across_the_rest(
    axes: dict[str, int], rule: Rule, rank: int, size: int, expected: Division
) -> None:
    grid = Grid(tuple(axes.items()))
    assert divide(of(rule, rank, grid), grid, rank, size) == expected


@given(
    st.sampled_from([(1, 1, 1), (2, 3, 1), (2, 2, 2), (1, 4, 2), (3, 2, 2), (2, 6, 1)]),
    st.integers(1, 6),
    st.sampled_from(["everywhere", "duplicated", "tied", "halves"]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_divisions_agree_between_ranks_and_count_each_term_once(
    sizes: tuple[int, int, int], size: int, kind: str
) -> None:
    """All ranks of a shard see it alike, all cross ranks each other; and what the shards of the cross ranks have put
    together are the terms of the sum, each once."""
    pp, dp, tp = sizes
    size = max(n for n in range(1, size + 1) if dp % n == 0)
    grid = Grid((("pp", pp), ("dp", dp), ("tp", tp)))
    ends = Rule(lambda at: whole("w", (8, 3)) if at["pp"] in (0, pp - 1) else None, frozenset({"pp"}))
    halves = Rule(lambda at: rows("w", 4 * (at["tp"] % 2), 4 * (at["tp"] % 2) + 4), frozenset({"tp"}))
    rule = {"everywhere": everywhere("w"), "duplicated": everywhere("w", "tp"), "tied": ends, "halves": halves}[kind]
    who = {rank: of(rule, rank, grid) for rank in range(grid.size) if rule.at(grid.coords(rank)) is not None}
    seen = {rank: divide(each, grid, rank, size) for rank, each in who.items()}
    for rank, mine in seen.items():
        assert mine.shard[mine.part] == rank
        assert len(mine.shard) == size
        assert all(seen[other].shard == mine.shard for other in mine.shard)
        places = [{**grid.coords(other), "dp": 0} for other in mine.shard]
        assert places == [places[0]] * size, "they differ only where ranks move in lockstep"
        assert rank in mine.cross
        assert all(seen[other].cross == mine.cross and seen[other].part == mine.part for other in mine.cross)
        assert set(mine.same) == {other for other in who[rank].copies if seen[other].part == mine.part}
        terms = [term for other in mine.cross for term in seen[other].shard]
        assert sorted(terms) == list(who[rank].summing)


@pytest.mark.parametrize(
    ("axes", "rule", "rank", "servers", "expected"),
    [
        ({"dp": 4}, everywhere("w"), 1, 2, Division((0, 1, 2, 3), 1, (1,), (1,), servers=(0, 1))),
        ({"dp": 4}, everywhere("w"), 3, 2, Division((0, 1, 2, 3), 2, (3,), (), servers=(0, 1))),
        ({"dp": 2, "tp": 2}, everywhere("w"), 1, 1, Division((1, 3), 0, (0, 1), (0, 1), servers=(1,))),
        # Work that is duplicated on tp: each server there has the sum already.
        ({"dp": 2, "tp": 2}, everywhere("w", "tp"), 1, 1, Division((1, 3), 0, (1,), (0, 1), servers=(1,))),
        ({"dp": 2, "tp": 2}, everywhere("w", "tp"), 3, 1, Division((1, 3), 1, (3,), (), servers=(1,))),
        # What is alike along the depth, too, has its servers at each place of that.
        ({"dp": 2, "depth": 2}, everywhere("w"), 1, 1, Division((0, 1, 2, 3), 1, (1,), (1,), servers=(0, 1))),
        # Two stages have servers of their own, which sum what they share.
        ({"pp": 3, "dp": 2}, TIED, 4, 1, Division((4, 5), 0, (0, 4), (0, 4), across_stages=True, servers=(4,))),
        ({"pp": 3, "dp": 2}, TIED, 5, 1, Division((4, 5), 1, (5,), (), across_stages=True, servers=(4,))),
    ],
)
def test_the_first_replicas_serve_ranks_that_move_in_lockstep_with_them(
    axes: dict[str, int], rule: Rule, rank: int, servers: int, expected: Division
) -> None:
    grid = Grid(tuple(axes.items()))
    assert serve(of(rule, rank, grid), grid, rank, servers) == expected


def test_ranks_without_a_part_are_no_owners() -> None:
    grid = Grid((("dp", 3),))
    seen = [serve(of(everywhere("w"), rank, grid), grid, rank, 2) for rank in range(3)]
    assert [one.owners for one in seen] == [(0, 1)] * 3
    assert [one.part for one in seen] == [0, 1, 2]
    assert divide(of(everywhere("w"), 1, grid), grid, 1, 3).owners == (0, 1, 2)


@given(st.lists(st.integers(0, 4), max_size=4), st.integers(0, 300), st.integers(0, 300))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_flat_boxes_are_the_elements_of_a_range_in_order(shape: list[int], start: int, length: int) -> None:
    numbers = torch.arange(prod(shape)).view(shape)
    start = min(start, prod(shape))
    stop = min(start + length, prod(shape))
    boxes = list(flat_boxes(shape, start, stop))
    parts = [numbers[tuple(slice(*span) for span in box)].flatten() for box in boxes]
    assert torch.equal(torch.cat([torch.arange(0), *parts]), torch.arange(start, stop))
    assert all(len(part) for part in parts)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_flat_boxes_are_as_few_as_they_can_be() -> None:
    assert list(flat_boxes((2, 3, 4), 0, 24)) == [((0, 2), (0, 3), (0, 4))]
    assert list(flat_boxes((2, 3, 4), 4, 12)) == [((0, 1), (1, 3), (0, 4))]
    assert len(list(flat_boxes((4, 4, 4), 5, 59))) == 5, "the bound is reached"
    assert list(flat_boxes((), 0, 1)) == [()]


def test_stacked_pieces_are_views_that_tile_the_fused_tensor() -> None:
    fused = torch.arange(30.0).view(10, 3)
    placement = stacked([("q", 6), ("k", 2), ("v", 2)], fused.shape)
    q, k, v = placement.pieces
    assert [(p.name, p.shape, p.numel) for p in (q, k, v)] == [("q", (6, 3), 18), ("k", (2, 3), 6), ("v", (2, 3), 6)]
    assert torch.equal(torch.cat([piece.of(fused) for piece in placement.pieces]), fused)
    k.of(fused).zero_()
    assert fused[6:8].eq(0).all()
    assert fused[8:].ne(0).all()
    with pytest.raises(AssertionError, match="does not fill"):
        stacked([("q", 6), ("k", 3)], fused.shape)


def test_assembling_puts_boxes_in_place_and_shows_what_nobody_holds() -> None:
    full = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    boxes = [((0, 2), (0, 3)), ((2, 4), (0, 2))]
    parts = [(box, full[tuple(slice(*span) for span in box)]) for box in boxes]
    found = assemble(full.shape, parts)
    assert found.dtype == torch.float64
    full[2:, 2] = float("nan")
    torch.testing.assert_close(found, full, rtol=0, atol=0, equal_nan=True)
    scalar = assemble((), [((), torch.tensor(5.0))])
    assert scalar.item() == 5.0


def test_a_census_asks_for_each_place_once_however_many_ranks_ask_it() -> None:
    asked: list[Coords] = []

    def place(coords: Coords) -> Placement:
        asked.append(coords)
        half = (4 * (coords["tp"] % 2), 4 * (coords["tp"] % 2) + 4)
        return Placement((4,), (Piece("w", (8,), (half,), ((0, 4),)),))

    grid = Grid((("dp", 3), ("tp", 32)))
    census = Census(Rule(place, frozenset({"tp"})), grid)
    for rank in range(grid.size):
        (found,) = census.holders(grid.coords(rank))
        assert found.copies == found.summing == tuple(range(rank % 2, grid.size, 2))
    assert len(asked) == grid.size + 32, "a rank asks where it is itself"
