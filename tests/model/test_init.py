from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.model.init import fill
from shoal.placement import Box, Piece, Placement, stacked, whole

SHAPE = (9, 5, 4)


def full(name: str, shape: tuple[int, ...] = SHAPE, *, seed: int = 1, std: float = 0.02) -> Tensor:
    values = torch.full(shape, float("nan"))
    fill(values, whole(name, shape), seed, std)
    return values


def spans(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: (min(ends), max(ends)))


@given(st.tuples(*map(spans, SHAPE)), st.tuples(*(st.integers(0, 2) for _ in SHAPE)))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_box_is_that_box_of_the_full_tensor_bit_for_bit_and_padding_is_zero(
    box: Box, margin: tuple[int, ...]
) -> None:
    at = tuple((more, more + stop - start) for (start, stop), more in zip(box, margin, strict=True))
    local = torch.full([stop + more for (_, stop), more in zip(at, margin, strict=True)], float("nan"))
    piece = Piece("a.weight", SHAPE, box, at)
    fill(local, Placement(tuple(local.shape), (piece,)), 1, 0.02)
    assert torch.equal(piece.of(local), full("a.weight")[tuple(slice(*span) for span in box)])
    piece.of(local).zero_()
    assert not local.any()


def test_values_are_normal_with_the_given_deviation() -> None:
    values = full("a.weight", (400, 500), std=0.03)
    assert abs(values.mean().item()) < 5 * 0.03 / values.numel() ** 0.5
    assert abs(values.std().item() / 0.03 - 1) < 5 / (2 * values.numel()) ** 0.5
    within = (values.abs() < 0.03).double().mean().item()
    assert abs(within - 0.6827) < 0.005
    rows = torch.corrcoef(values)
    assert (rows - torch.eye(400)).abs().max() < 6 / 500**0.5, "rows are drawn apart from each other"


def test_seeds_and_names_give_other_values_and_the_same_ones_give_the_same() -> None:
    assert torch.equal(full("a.weight"), full("a.weight"))
    assert not torch.isclose(full("a.weight"), full("a.weight", seed=2)).any()
    assert not torch.isclose(full("a.weight"), full("b.weight")).any()


def test_parts_of_a_fused_tensor_are_the_separate_logical_tensors() -> None:
    fused = torch.empty(10, 6)
    fill(fused, stacked([("q.weight", 6), ("k.weight", 4)], fused.shape), 1, 0.02)
    assert torch.equal(fused, torch.cat([full("q.weight", (6, 6)), full("k.weight", (4, 6))]))


def test_other_dtypes_round_the_same_float32_draw() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        values = torch.empty(SHAPE, dtype=dtype)
        fill(values, whole("a.weight", SHAPE), 1, 0.02)
        assert torch.equal(values, full("a.weight").to(dtype))


def test_vectors_are_ones_and_biases_zeros() -> None:
    assert full("norm.weight", (7,)).eq(1).all()
    assert full("linear.bias", (7,)).eq(0).all()


def test_without_a_deviation_everything_is_zero() -> None:
    assert full("norm.weight", (7,), std=0.0).eq(0).all()
    assert full("a.weight", std=0.0).eq(0).all()


def test_drawing_leaves_pytorchs_own_generator_alone() -> None:
    before = torch.get_rng_state()
    full("a.weight")
    assert torch.equal(torch.get_rng_state(), before)
