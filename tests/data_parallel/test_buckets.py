from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.data_parallel.buckets import Bucket, Range, build_buckets
from shoal.local import LocalParameter
from shoal.placement import Holders, Piece, Placement, stacked, whole

ALL, PAIR, SOME = (Holders(ranks, ranks) for ranks in ((0, 1, 2, 3), (0, 2), (0, 1)))


def held(
    name: str, *shape: int, unit: int = 0, dtype: torch.dtype = torch.float32, who: Holders = ALL
) -> LocalParameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(unit)).to(dtype)
    return LocalParameter(name, nn.Parameter(values), unit, whole(name, shape), (who,))


def names(buckets: list[Bucket]) -> list[list[str]]:
    return [[slot.held.name for slot in bucket.slots] for bucket in buckets]


def layers(count: int) -> list[LocalParameter]:
    """Each unit: 24 elements, 96 bytes in float32."""
    parts = [[held(f"n{u}", 4, unit=u), held(f"w{u}", 5, 4, unit=u)] for u in range(count)]
    return [one for unit in parts for one in unit]


def test_parameters_become_views_and_keep_their_values() -> None:
    ones = layers(2)
    before = [one.parameter.detach().clone() for one in ones]
    (bucket,) = build_buckets(ones, ("exp_avg",))
    assert all(torch.equal(one.parameter, old) for one, old in zip(ones, before, strict=True))
    assert bucket.params.numel() == bucket.grads.numel() == bucket.states["exp_avg"].numel() == 48
    assert not bucket.grads.any()
    bucket.params.copy_(torch.arange(48.0))
    assert ones[3].parameter.flatten().tolist() == list(range(20)), "the last unit first, what decays first in it"
    assert ones[0].parameter.tolist() == [44, 45, 46, 47]
    for slot in bucket.slots:
        bucket.grad(slot).fill_(slot.start)
        assert bucket.grads[slot.start : slot.stop].eq(slot.start).all()
        assert bucket.grad(slot).shape == slot.held.parameter.shape
    bucket.check_views()


def test_a_parameter_whose_data_was_replaced_is_found() -> None:
    ones = layers(1)
    (bucket,) = build_buckets(ones)
    with torch.no_grad():
        ones[1].parameter.mul_(2)
        bucket.check_views()
        ones[1].parameter.data = ones[1].parameter.detach().clone()
    with pytest.raises(AssertionError, match="w0 no longer lies in its bucket"):
        bucket.check_views()


def test_a_parameter_without_elements_is_no_fault() -> None:
    (bucket,) = build_buckets([held("w", 2, 3), held("empty", 0)])
    bucket.check_views()


def test_whole_units_fill_a_bucket_up_to_the_cap_in_backward_order() -> None:
    assert names(build_buckets(layers(5), cap_bytes=2 * 96)) == [
        ["w4", "n4", "w3", "n3"],
        ["w2", "n2", "w1", "n1"],
        ["w0", "n0"],
    ]
    assert [bucket.units for bucket in build_buckets(layers(3), cap_bytes=2 * 96 - 1)] == [{2}, {1}, {0}]
    assert len(build_buckets(layers(3), cap_bytes=1)) == 3, "a unit above the cap is a bucket of its own"
    assert build_buckets([]) == []


def test_the_order_in_which_parameters_are_given_does_not_matter_across_units() -> None:
    units = [layers(3)[2 * u : 2 * u + 2] for u in (1, 2, 0)]
    assert names(build_buckets([one for unit in units for one in unit])) == names(build_buckets(layers(3)))


def test_dtypes_never_share_a_bucket() -> None:
    wide = [held(f"d{u}", 2, 2, unit=u, dtype=torch.float64) for u in range(2)]
    buckets = build_buckets([*layers(2), *wide])
    assert names(buckets) == [["w1", "n1", "w0", "n0"], ["d1", "d0"]]
    assert [bucket.params.dtype for bucket in buckets] == [torch.float32, torch.float64]


def test_decay_runs_cover_the_bucket_and_alternate() -> None:
    (bucket,) = build_buckets(layers(2))
    assert bucket.decay_runs() == [(0, 20, True), (20, 24, False), (24, 44, True), (44, 48, False)]
    (matrices,) = build_buckets([held(f"w{u}", 2, 3, unit=u) for u in range(3)])
    assert matrices.decay_runs() == [(0, 18, True)]


def test_ranges_join_neighbours_that_the_same_ranks_hold() -> None:
    who = (ALL, ALL, PAIR, ALL)
    (bucket,) = build_buckets([held(f"w{u}", 2, 3, unit=u, who=who[u]) for u in range(4)])
    assert bucket.ranges == [Range(0, 6, ALL), Range(6, 12, PAIR), Range(12, 24, ALL)]


def test_pieces_of_a_fused_parameter_are_ranges_of_their_own() -> None:
    parts = stacked([("q", 4), ("k", 1), ("v", 1)], (6, 5))
    fused = LocalParameter("qkv", nn.Parameter(torch.randn(6, 5)), 1, parts, (PAIR, SOME, SOME))
    (bucket,) = build_buckets([fused, held("w", 2, 5, unit=0, who=SOME)])
    assert bucket.ranges == [Range(0, 20, PAIR), Range(20, 40, SOME)]


def test_pieces_that_different_ranks_hold_must_be_rows() -> None:
    left, right = (Piece(n, (2, 2), ((0, 2), (0, 2)), ((0, 2), (at, at + 2))) for n, at in (("a", 0), ("b", 2)))
    odd = LocalParameter("ab", nn.Parameter(torch.randn(2, 4)), 0, Placement((2, 4), (left, right)), (PAIR, SOME))
    with pytest.raises(AssertionError, match="must be rows"):
        build_buckets([odd])
