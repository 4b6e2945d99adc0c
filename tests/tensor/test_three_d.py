"""Cubes and other boxes of ranks: a decoder on them, and where its tensors lie."""

from __future__ import annotations

from itertools import product

import pytest
from decoder_ranks import TINY, TINY6, Case, assert_evaluates_alike, assert_trains_alike, name, tied
from families import shape_of
from grids import grid_of

from shoal.model.roles import Kind, Role
from shoal.placement import holders
from shoal.tensor.one_d import OneD
from shoal.tensor.three_d import ThreeD
from shoal.train.pool import Pool

SMALL, SMALL6 = (shape.model_copy(update={"layers": 2}) for shape in (TINY, TINY6))
ONE_KEY_HEAD = SMALL.model_copy(update={"kv_heads": 1, "z_loss": 0.01})
NARROW = SMALL6.model_copy(update={"ffn": 1, "vocab": 5})
"""Where all but one of the columns have no feed-forward at all, and the vocabulary is uneven."""

CASES = [
    Case(SMALL, ThreeD(2, 2, 2), samples=8),
    Case(tied(SMALL), ThreeD(2, 2, 2), length=5, samples=1),
    Case(ONE_KEY_HEAD, ThreeD(1, 2, 4), length=7),
    Case(SMALL6, ThreeD(1, 2, 3), length=7, samples=2),
    Case(tied(SMALL6), ThreeD(2, 3, 1), length=7, samples=5, recompute=True),
    Case(SMALL6, ThreeD(3, 1, 2), length=7, samples=4),
    Case(NARROW, ThreeD(1, 2, 3), length=5),
    Case(NARROW, ThreeD(3, 2, 1), length=5),
    Case(shape_of("gpt2", dropout=0.1), ThreeD(2, 2, 2), length=13),
]
MORE_CASES = [
    Case(shape_of("qwen3", dropout=0.1), ThreeD(1, 2, 2), length=13),
    Case(shape_of("gemma", dropout=0.1), ThreeD(2, 1, 2), length=13, recompute=True),
    Case(SMALL, ThreeD(4, 1, 1), length=5),
    Case(SMALL, ThreeD(1, 4, 1), length=5),
]


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_decoder_trains_as_on_one_process(eight: Pool, case: Case) -> None:
    assert_trains_alike(eight, case)


@pytest.mark.parity
@pytest.mark.parametrize("case", MORE_CASES, ids=name)
def test_more_decoders_do(eight: Pool, case: Case) -> None:
    assert_trains_alike(eight, case)


@pytest.mark.parity
@pytest.mark.parametrize(
    "case",
    [
        Case(SMALL6, ThreeD(1, 2, 3), length=7),
        Case(tied(SMALL), ThreeD(2, 2, 2), length=6, samples=1),
        Case(SMALL, ThreeD(2, 1, 4), length=6),
    ],
    ids=name,
)
def test_without_gradients_every_rank_has_all_logits(eight: Pool, case: Case) -> None:
    assert_evaluates_alike(eight, case)


# ---- where tensors lie -------------------------------------------------------------------------------------


def nested(total: int, *sides: tuple[int, int]) -> tuple[int, int]:
    """The part of a part, of sizes that divide, each (number, of how many)."""
    start, size = 0, total
    for number, count in sides:
        size //= count
        start += number * size
    return start, start + size


@pytest.mark.parametrize("kind", ["gate_up", "head", "embed", "down", "out_proj"])
def test_second_linears_have_the_last_two_sides_exchanged(kind: Kind) -> None:
    a, b, c = 2, 3, 4
    role = Role(kind, heads=4 if kind == "out_proj" else 0)
    rule = ThreeD(a, b, c).place(role, "it", "weight", (24, 48))
    for i, k, j in product(range(a), range(b), range(c)):
        placement = rule.at({"a": i, "b": k, "c": j})
        assert placement is not None
        (piece,) = placement.pieces
        out, inside = ((k, b), (j, c)) if kind in ("down", "out_proj") else ((j, c), (k, b))
        assert piece.box == (nested(24, out), nested(48, inside, (i, a)))


@pytest.mark.parametrize(
    ("kind", "own", "over"),
    [("norm", "b", "ac"), ("down", "b", "ac"), ("gate_up", "c", "ab"), ("head_norm", "", "abc")],
)
def test_vectors_are_summed_over_all_sides_but_that_which_divides_them(kind: Kind, own: str, over: str) -> None:
    grid = grid_of("tp=12:2x3x2")
    rule = ThreeD(2, 3, 2).place(Role(kind), "it", "weight" if "norm" in kind else "bias", (12,))
    for rank in range(grid.size):
        coords = grid.coords(rank)
        placement = rule.at(coords)
        assert placement is not None
        side = dict(grid.axes).get(own, 1)
        assert placement.pieces[0].box == (nested(12, (coords.get(own, 0), side)),)
        (who,) = holders(rule, grid, coords)
        assert who.summing == tuple(grid.rank(place) for place in grid.vary(coords, set(over)))


@pytest.mark.parametrize("kind", ["qkv", "gate_up", "out_proj", "down", "embed", "norm"])
def test_one_column_of_boxes_is_one_dimension_with_sequence_parallelism(kind: Kind) -> None:
    """1×1×P holds what the positions of P ranks need, piece by piece."""
    role = Role(
        kind, parts=(("p", 16), ("r", 8)) if kind in ("qkv", "gate_up") else (), heads=8 if kind == "qkv" else 0
    )
    for parameter, shape in (("weight", (24, 8)), ("weight", (24,))):
        box, line = (on.place(role, "it", parameter, shape) for on in (ThreeD(1, 1, 4), OneD(4, sequence=True)))
        for at in range(4):
            mine, theirs = box.at({"a": 0, "b": 0, "c": at}), line.at({"tp": at})
            assert mine is not None
            assert theirs is not None
            assert mine == theirs
