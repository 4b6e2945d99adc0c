from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas import plain
from torch import nn

from shoal import placement
from shoal.config import Optimizer
from shoal.data_parallel.buckets import Bucket, Range, build_buckets
from shoal.local import LocalParameter
from shoal.mesh import Grid
from shoal.optim.treatment import Treatments
from shoal.placement import Division, Holders, Piece, Placement, stacked, whole

ALL, PAIR, SOME = plain(0, 1, 2, 3), plain(0, 2), plain(0, 1)
TREAT = Treatments(Optimizer())


def held(
    name: str, *shape: int, unit: int = 0, dtype: torch.dtype = torch.float32, who: Holders = ALL
) -> LocalParameter:
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    return LocalParameter(name, parameter, (unit,), whole(name, shape), (who,))


def layers(count: int) -> list[LocalParameter]:
    """Each unit: 24 elements, 96 bytes in float32."""
    parts = [[held(f"n{u}", 4, unit=u), held(f"w{u}", 5, 4, unit=u)] for u in range(count)]
    return [one for unit in parts for one in unit]


def divide(who: Holders, rank: int = 0, size: int = 4, ranks: int = 4) -> Division:
    return placement.divide(who, Grid((("dp", ranks),)), rank, size)


def build(ones: Sequence[LocalParameter], cap_bytes: int = 1 << 20, **where: int) -> list[Bucket]:
    return build_buckets(ones, partial(divide, **where), TREAT, cap_bytes)


def names(buckets: list[Bucket]) -> list[list[str]]:
    return [[slot.held.name for slot in bucket.slots] for bucket in buckets]


def test_whole_units_fill_a_bucket_up_to_the_cap_in_backward_order() -> None:
    """In a unit, what decays comes first."""
    assert names(build(layers(5), 2 * 96)) == [["w4", "n4", "w3", "n3"], ["w2", "n2", "w1", "n1"], ["w0", "n0"]]
    assert [bucket.units for bucket in build(layers(3), 2 * 96 - 1)] == [{2}, {1}, {0}]
    assert [bucket.units for bucket in build(layers(3), 0)] == [{2}, {1}, {0}], "a unit above the cap is a bucket"
    assert build([]) == []
    (bucket,) = build(layers(2))
    assert [(slot.start, slot.stop) for slot in bucket.slots] == [(0, 20), (20, 24), (24, 44), (44, 48)]
    flat = torch.arange(float(bucket.size))
    assert torch.equal(bucket.slots[2].of(flat), torch.arange(24.0, 44.0).view(5, 4))


def test_the_order_in_which_parameters_are_given_does_not_matter_across_units() -> None:
    units = [layers(3)[2 * u : 2 * u + 2] for u in (1, 2, 0)]
    assert names(build([one for unit in units for one in unit])) == names(build(layers(3)))


def test_what_has_another_dtype_or_other_holders_has_buckets_of_its_own() -> None:
    """All are sent in the order in which their first unit is done."""
    ones = [
        *layers(3),
        *(held(f"d{u}", 2, 2, unit=u, dtype=torch.float64) for u in (0, 1)),
        *(held(f"p{u}", 3, unit=u, who=PAIR) for u in (2, 1)),
        held("s2", 3, unit=2, who=SOME),
    ]
    found = build(ones)
    assert names(found) == [["s2"], ["p2", "p1"], ["d1", "d0"], ["w2", "n2", "w1", "n1", "w0", "n0"]]
    assert [bucket.dtype for bucket in found] == [torch.float32, torch.float32, torch.float64, torch.float32]
    assert [bucket.shard for bucket in found] == [(0, 1), (0, 2), (0, 1, 2, 3), (0, 1, 2, 3)]


def test_ranges_are_cut_where_the_holders_change() -> None:
    """The pieces of a fused parameter may have their own holders; neighbours that the same ranks hold are one range."""
    grid, size = Grid((("tp", 2), ("dp", 2))), 2
    own, everyone = plain(0, 1), plain(0, 1, 2, 3)  # rank 0 at tp 0; the key rows are at tp 1 too
    parts = stacked([("q", 3), ("k", 1), ("v", 1)], (5, 4))
    fused = [
        LocalParameter(f"qkv{u}", nn.Parameter(torch.zeros(5, 4)), (u,), parts, (own, everyone, everyone))
        for u in (1, 0)
    ]
    at = [partial(placement.divide, grid=grid, rank=rank, size=size) for rank in (0, 1)]
    buckets = [build_buckets(fused, each, TREAT) for each in at]
    (low,), (high,) = buckets
    q, kv = (at[0](who) for who in (own, everyone))
    assert q.shard == kv.shard == (0, 1)
    assert (q.cross, kv.cross) == ((0,), (0, 2))
    assert low.ranges == [Range(0, 12, q), Range(12, 20, kv), Range(20, 32, q), Range(32, 40, kv)]
    assert list(low.own_ranges()) == [Range(0, 12, q), Range(12, 20, kv)]
    assert list(high.own_ranges()) == [Range(0, 12, at[1](own)), Range(12, 20, at[1](everyone))]
    assert not low.spans_stages


def test_pieces_must_be_rows() -> None:
    left, right = (Piece(n, (2, 2), ((0, 2), (0, 2)), ((0, 2), (at, at + 2))) for n, at in (("a", 0), ("b", 2)))
    odd = LocalParameter("ab", nn.Parameter(torch.zeros(2, 4)), (0,), Placement((2, 4), (left, right)), (ALL, ALL))
    with pytest.raises(AssertionError, match="must be rows"):
        build([odd])


@pytest.mark.parametrize(
    ("elements", "own"), [(8, [2, 2, 2, 2]), (9, [3, 3, 3, 0]), (5, [2, 2, 1, 0]), (1, [1, 0, 0, 0])]
)
def test_sizes_are_rounded_up_to_the_ranks_and_padding_is_nobodys(elements: int, own: list[int]) -> None:
    for rank, mine in enumerate(own):
        (bucket,) = build([held("w", elements)], rank=rank)
        assert bucket.size == -(-elements // 4) * 4
        assert (bucket.high - bucket.low, bucket.low) == (bucket.size // 4, bucket.size // 4 * rank)
        assert sum(stop - start for start, stop, _ in bucket.own_ranges()) == mine
        assert sum(box.stop - box.start for box in bucket.own_boxes()) == mine
        part = torch.zeros(bucket.high - bucket.low)
        assert (
            sum(one.tensor.numel() for one in bucket.own_fragments("weight", part, partial(divide, rank=rank))) == mine
        )


@st.composite
def models(draw: st.DrawFn) -> list[LocalParameter]:
    """Parameters of all shapes in up to three units, some fused of pieces, a few of them blocks of larger tensors."""
    ones = []
    for number in range(draw(st.integers(1, 6))):
        rows = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        rest = draw(st.lists(st.integers(1, 4), max_size=2))
        name, shape = f"p{number}", (sum(rows), *rest)
        if draw(st.booleans()) and len(rows) == 1:
            at = tuple((0, n) for n in shape)  # a block of something larger
            moved = tuple((a + 2, b + 2) for a, b in at)
            lies = Placement(shape, (Piece(name, tuple(n + 3 for n in shape), moved, at),))
        elif draw(st.booleans()):
            lies = whole(name, ())
        else:
            lies = stacked([(f"{name}.{i}", n) for i, n in enumerate(rows)], shape)
        parameter = nn.Parameter(torch.zeros(lies.shape))
        ones.append(LocalParameter(name, parameter, (draw(st.integers(0, 2)),), lies, (ALL,) * len(lies.pieces)))
    return ones


@given(models(), st.integers(1, 5), st.integers(1, 2), st.sampled_from([0, 40, 1 << 20]))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_the_parts_of_a_bucket_tile_every_element_once(
    ones: list[LocalParameter], size: int, groups: int, cap_bytes: int
) -> None:
    """Ranges, boxes and fragments, for 1 … 5 parts, and one or two groups of ranks that hold them."""
    ranks = size * groups
    ones = [replace(one, holders=(plain(*range(ranks)),) * len(one.placement.pieces)) for one in ones]
    local = {one.name: torch.randn(one.placement.shape) for one in ones}
    of = {piece.name: one for one in ones for piece in one.placement.pieces}
    count = {p.name: torch.zeros(p.shape, dtype=torch.int64) for one in ones for p in one.placement.pieces}
    by_rank = [build(ones, cap_bytes, rank=rank, size=size, ranks=ranks) for rank in range(ranks)]
    for same in zip(*by_rank, strict=True):
        first = same[0]
        flat = torch.full((first.size,), float("nan"))
        decays = torch.full((first.size,), -1)
        for slot in first.slots:
            slot.of(flat).copy_(local[slot.held.name])
            decays[slot.start : slot.stop] = slot.held.parameter.ndim > 1
        in_ranges, in_boxes = (torch.zeros(first.size, dtype=torch.int64) for _ in range(2))
        for rank, bucket in enumerate(same):
            assert names([bucket]) == names([first])
            holding = tuple(range(rank % size, ranks, size))
            mine = slice(bucket.low, bucket.high)
            for start, stop, division in bucket.own_ranges():
                in_ranges[mine][start:stop] += 1
                assert division.same == holding
            for box in bucket.own_boxes():
                in_boxes[mine][box.start : box.stop] += 1
                assert (decays[mine][box.start : box.stop] == (box.treatment.weight_decay > 0)).all()
                assert bucket.slots[box.slot].held is of[box.piece.name]
            for one in bucket.own_fragments("weight", flat[mine], partial(divide, rank=rank, size=size, ranks=ranks)):
                assert one.copies == holding
                assert torch.equal(one.tensor, one.piece.of(local[of[one.piece.name].name]))
                count[one.piece.name][tuple(slice(*span) for span in one.piece.box)] += 1
        for covered in (in_ranges, in_boxes):
            assert torch.equal(covered, (decays >= 0) * groups)
    for name, one in of.items():
        (piece,) = (piece for piece in one.placement.pieces if piece.name == name)
        assert (count[name][tuple(slice(*span) for span in piece.box)] == groups).all()
        assert count[name].sum() == groups * piece.numel
