"""Squares, and several of them at depths: a decoder on them, and where its tensors lie."""

from __future__ import annotations

import pytest
from decoder_ranks import TINY, TINY6, Case, assert_evaluates_alike, assert_trains_alike, name, tied
from families import shape_of
from grids import grid_of
from torch import nn

from shoal.comm.world import World
from shoal.mesh import Coords, Mesh
from shoal.model.roles import Role
from shoal.placement import Placement, holders
from shoal.tensor.grid import OnGrid
from shoal.tensor.two_and_half_d import TwoAndHalfD
from shoal.tensor.two_d import LoopedLinear, TwoD
from shoal.tensor.vocabulary import VocabularyEmbedding, VocabularyHead
from shoal.train.pool import Pool

SMALL, SMALL6 = (shape.model_copy(update={"layers": 2}) for shape in (TINY, TINY6))
ONE_KEY_HEAD = SMALL.model_copy(update={"kv_heads": 1, "z_loss": 0.01})
NARROW = SMALL6.model_copy(update={"ffn": 1, "vocab": 3})
"""Where half of the columns have no feed-forward at all, and the vocabulary is uneven."""

CASES = [
    Case(SMALL, TwoD(2), samples=4),
    Case(tied(SMALL), TwoD(2, loop=True), length=5),
    Case(ONE_KEY_HEAD, TwoD(2), length=7),
    Case(SMALL6, TwoD(2), length=7, samples=1),
    Case(tied(SMALL6), TwoD(2, loop=True), length=7, samples=5, recompute=True),
    Case(NARROW, TwoD(2), length=5),
    Case(NARROW, TwoD(2, loop=True), length=5),
    Case(shape_of("gpt2", dropout=0.1), TwoD(2), length=13),
    Case(SMALL, TwoAndHalfD(2, 2), samples=8),
    Case(tied(SMALL6), TwoAndHalfD(2, 2, loop=True), length=7, samples=3),
]
MORE_CASES = [
    Case(shape_of("gpt2", dropout=0.1), TwoD(2, loop=True), length=13),
    Case(shape_of("qwen3", dropout=0.1), TwoD(2), length=13),
    Case(shape_of("gemma", dropout=0.1), TwoAndHalfD(2, 2), length=13, recompute=True),
    Case(SMALL, TwoAndHalfD(2, 1), length=5),
    Case(SMALL, TwoAndHalfD(1, 3), length=5),
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
        Case(SMALL6, TwoD(2), length=7, samples=3),
        Case(tied(SMALL), TwoD(2, loop=True), length=6, samples=1),
        Case(SMALL, TwoAndHalfD(2, 2), length=6, samples=3),
    ],
    ids=name,
)
def test_without_gradients_every_rank_has_all_logits(eight: Pool, case: Case) -> None:
    assert_evaluates_alike(eight, case)


@pytest.mark.parity
def test_nine_and_more_ranks() -> None:
    """Where a side of two cannot tell one axis from the other, three can."""
    with Pool(12) as twelve:
        for case in (Case(SMALL6, TwoD(3), length=7, samples=4), Case(SMALL6, TwoD(3, loop=True), length=7, samples=2)):
            assert_trains_alike(twelve, case)
        assert_trains_alike(twelve, Case(SMALL6, TwoAndHalfD(2, 3), length=7, samples=5))


# ---- where tensors lie -------------------------------------------------------------------------------------


def lies(on: OnGrid, role: Role, parameter: str, shape: tuple[int, ...], coords: Coords) -> Placement:
    found = on.place(role, "it", parameter, shape).at(coords)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["qkv", "gate_up", "out_proj", "down", "head", "embed"])
def test_outputs_of_every_matrix_are_the_columns_and_its_inputs_the_rows(kind: str) -> None:
    role = Role(kind, heads=3 if kind in ("qkv", "out_proj") else 0, parts=(("p", 9),) if kind == "qkv" else ())  # type: ignore[arg-type]
    for row in range(3):
        for col in range(3):
            coords = {"depth": 0, "row": row, "col": col}
            (piece,) = lies(TwoD(3), role, "weight", (9, 8), coords).pieces
            inputs = ((0, 3), (3, 6), (6, 8))
            assert piece.box == ((3 * col, 3 * col + 3), inputs[row])


@pytest.mark.parametrize("kind", ["norm", "out_proj", "down", "qkv"])
def test_vectors_are_divided_over_columns_and_summed_over_rows_and_depths(kind: str) -> None:
    on, grid = TwoAndHalfD(2, 2), grid_of("tp=8:2.5d/2")
    role = Role(kind, heads=2 if kind == "qkv" else 0, parts=(("p", 8),) if kind == "qkv" else ())  # type: ignore[arg-type]
    rule = on.place(role, "it", "bias", (8,))
    for rank in range(8):
        col = rank % 2
        coords = grid.coords(rank)
        assert lies(on, role, "bias", (8,), coords).pieces[0].box == ((4 * col, 4 * col + 4),)
        assert holders(rule, grid, coords)[0].summing == tuple(range(col, 8, 2))


def test_a_matrix_is_summed_over_depths_alone() -> None:
    grid = grid_of("tp=8:2.5d/2")
    rule = TwoAndHalfD(2, 2).place(Role("down"), "it", "weight", (8, 8))
    for rank in range(8):
        assert holders(rule, grid, grid.coords(rank))[0].summing == (rank % 4, rank % 4 + 4)


def test_the_loop_is_the_form_of_linears_alone() -> None:
    """Embedding and output matrix are gathered in both."""
    on, mesh = TwoD(1, loop=True), Mesh((("depth", 1), ("row", 1), ("col", 1)), World())
    kinds = {"embed": nn.Embedding(4, 6), "gate_up": nn.Linear(6, 4), "down": nn.Linear(4, 6), "head": nn.Linear(6, 4)}
    made = [type(on.adapt(Role(kind), module, mesh)) for kind, module in kinds.items()]  # type: ignore[arg-type]
    assert made == [VocabularyEmbedding, LoopedLinear, LoopedLinear, VocabularyHead]
