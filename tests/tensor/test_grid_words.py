"""Words that a rank of a grid receives, by the ledger: the formulas, to the word, where all sizes divide.

M tokens; a linear from K features to N, whose weight has K·N elements; h hidden, q = heads · their size, k the same of
key/value heads, f feed-forward, V vocabulary. A square has s·s ranks (q in the papers) at d depths. X and W are fetched
again for the backward pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from grids import SHAPE, interpreter, mesh_of, middle_block, stream_block
from tensor_ranks import axes_of, batch, divide
from torch import nn

from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.config import Config, Model, load
from shoal.layout import Layout
from shoal.model.context import Context
from shoal.model.decoder import Decoder, decoder_roles
from shoal.model.roles import Role
from shoal.report.tensor_words import tensor_meaning
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data

Words = Mapping[str, float]
"""By axis and purpose."""

LINES = {
    4: ["1d", "1d-sp", "2d", "2d{form=loop}", "2.5d/1", "1x2x2", "2x1x2", "2x2x1", "1x1x4", "1x4x1", "4x1x1"],
    6: ["1d", "1d-sp", "1x2x3", "2x3x1", "3x1x2"],
    8: ["1d", "1d-sp", "2.5d/2", "2.5d/2{form=loop}", "3d", "1x2x4", "1x4x2", "2x1x4", "4x2x1", "8x1x1"],
    9: ["2d", "2d{form=loop}"],
    12: ["2.5d/3", "2.5d/3{form=loop}", "2x2x3"],
}
"""By the number of ranks. Where a side is 2, formulas of one or of two of it are alike; so there are others."""


@pytest.fixture(scope="module")
def twelve() -> Iterator[Pool]:
    with Pool(12) as workers:
        yield workers


RANKS = pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        (4, "pool"),
        (6, "eight"),
        (8, "eight"),
        pytest.param(9, "twelve", marks=pytest.mark.parity),
        pytest.param(12, "twelve", marks=pytest.mark.parity),
    ],
)


@dataclass(frozen=True)
class Sides:
    """Of a grid, 1 for those that its kind does not have."""

    tp: int = 1
    depth: int = 1
    row: int = 1
    a: int = 1
    b: int = 1
    c: int = 1

    @classmethod
    def of(cls, line: str) -> Sides:
        return cls(**{axis: size for axis, size in interpreter(line).sizes.items() if axis != "col"})

    @property
    def box(self) -> int:
        return self.a * self.b * self.c


def taken(ledger: Ledger) -> dict[str, float]:
    """What there is in the ledger, which then is empty."""
    table = {key: words for key, words in ledger.table().items() if words}
    ledger.clear()
    return table


def exactly(words: Words) -> object:
    return pytest.approx({key: n for key, n in words.items() if n}, rel=1e-12)


# ---- one linear --------------------------------------------------------------------------------------------

SAMPLES, LENGTH, NARROW, WIDE = 24, 24, 48, 144
TOKENS = SAMPLES * LENGTH


def of_linears(world: World, lines: list[str]) -> dict[tuple[str, str], tuple[Words, Words]]:
    """Of the forward and the backward pass, by line, of a block's first and of its second linear."""
    found = {}
    for line in lines:
        on, mesh = interpreter(line), mesh_of(line, world)
        on.see(Context(None, length=LENGTH))
        for which, features, block, ports in (
            ("first", (NARROW, WIDE), stream_block, on.first),
            ("second", (WIDE, NARROW), middle_block, on.second),
        ):
            linear = nn.Linear(*features, bias=False, device="meta")
            placement = on.place(Role("gate_up" if which == "first" else "down"), "it", "weight", linear.weight.shape)
            linear.weight = nn.Parameter(torch.randn(placement.at(mesh.coords).shape))  # type: ignore[union-attr]
            x = block(torch.randn(SAMPLES, LENGTH, features[0]), on, mesh.coords).requires_grad_()
            y: Any = on.linear(linear, ports(features[0], mesh), (), mesh)(x)
            forward = taken(world.ledger)
            y.backward(torch.ones_like(y))
            found[line, which] = forward, taken(world.ledger)
    return found


def one_linear(line: str, which: str) -> tuple[Words, Words]:
    """Forward and backward."""
    on = Sides.of(line)
    k, n = (NARROW, WIDE) if which == "first" else (WIDE, NARROW)
    mk, kn, mn = TOKENS * k, k * n, TOKENS * n
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()

    def add(axis: str, times: tuple[float, float], words: float) -> None:
        forward[f"{axis}/tensor"] += times[0] * words  # type: ignore[assignment]
        backward[f"{axis}/tensor"] += times[1] * words  # type: ignore[assignment]

    # X moves once forward; backward it is fetched again and its gradient leaves. So does W.
    add("col", (1, 2), (on.row - 1) * mk / on.row**2 / on.depth)
    add("row", (1, 2), (on.row - 1) * kn / on.row**2)
    c, b = ("c", "b") if which == "first" else ("b", "c")
    add(c, (1, 2), (getattr(on, c) - 1) * mk / on.box)
    add("a", (1, 2), (on.a - 1) * kn / on.box)
    add(b, (1, 1), (getattr(on, b) - 1) * mn / on.box)
    share = (on.tp - 1) / on.tp
    if line.endswith("1d-sp"):
        add("tp", (1, 2) if which == "first" else (1, 1), share * (mk if which == "first" else mn))
    else:
        add("tp", (0, 2) if which == "first" else (2, 0), share * (mk if which == "first" else mn))
    return forward, backward


@RANKS
def test_one_linear(ranks: int, workers: str, request: pytest.FixtureRequest) -> None:
    lines = [f"tp={ranks}:{kind}" for kind in LINES[ranks]]
    for found in request.getfixturevalue(workers).run(of_linears, lines, ranks=ranks):
        for (line, which), (forward, backward) in found.items():
            known = one_linear(line, which)
            assert forward == exactly(known[0]), f"{line}, {which}, forward"
            assert backward == exactly(known[1]), f"{line}, {which}, backward"


GRIDS = [f"tp={ranks}:{kind}" for ranks, kinds in LINES.items() for kind in kinds if "1d" not in kind]


@pytest.mark.parametrize("line", [*GRIDS, "tp=27:3d"])
def test_what_one_linear_moves_is_what_a_layout_says_it_costs(line: str) -> None:
    """A layout is described by its words for a first linear, such as ``0.75·MK + 0.75·KN``."""
    words = {"MK": TOKENS * NARROW, "KN": NARROW * WIDE, "MN": TOKENS * WIDE}
    _, cost = tensor_meaning(Layout.parse(line))
    told = re.findall(r"([\d.]+)·(MK|KN|MN)", cost.split("=")[-1])
    moved = sum(sum(passes.values()) for passes in one_linear(line, "first"))
    assert sum(float(times) * words[what] for times, what in told) == pytest.approx(moved, rel=5e-3)  # of three digits


# ---- one block ---------------------------------------------------------------------------------------------

SHARED = SHAPE.model_copy(update={"kv_heads": 2})
"""With fewer key/value heads than some grids have columns: each is then on several ranks."""


def of_blocks(world: World, lines: list[str], shape: Model) -> dict[str, tuple[Words, Words]]:
    found = {}
    for line in lines:
        on = interpreter(line)
        made = divide(partial(Decoder, shape), decoder_roles(shape), on, world, axes_of(on))
        ctx = made.localise(made.module.context(batch(shape.vocab, SAMPLES, LENGTH)))
        x = stream_block(torch.randn(SAMPLES, LENGTH, shape.hidden).double(), on, made.mesh.coords).requires_grad_()
        taken(world.ledger)
        y = made.module.blocks[0](x, ctx)
        forward = taken(world.ledger)
        y.backward(torch.ones_like(y))
        found[line] = forward, taken(world.ledger)
    return found


@dataclass(frozen=True)
class Block:
    """What a block of a decoder moves for ``tokens``."""

    shape: Model
    tokens: int
    line: str

    @property
    def queries(self) -> int:
        return self.shape.heads * self.shape.head_dim

    @property
    def keys(self) -> int:
        """Of the key/value heads as ranks have them: at least one each."""
        return max(self.shape.kv_heads, Sides.of(self.line).c) * self.shape.head_dim

    @property
    def weights(self) -> int:
        """h(q + 2k) + qh + 3hf."""
        h, f = self.shape.hidden, self.shape.ffn
        return h * (self.queries + 2 * self.keys) + self.queries * h + 3 * h * f

    def words(self, backward: bool) -> Words:
        on, h, f, q, k = Sides.of(self.line), self.shape.hidden, self.shape.ffn, self.queries, self.keys
        again = int(backward)  # X and W are fetched
        square, depth, share = (on.row - 1) / on.row**2, on.depth, (on.tp - 1) / on.tp
        stream = 8 / 2 + 2 * again * self.line.endswith("1d-sp")  # 4 forward and 4 backward
        return {
            "tp/tensor": stream * share * self.tokens * h,
            "col/tensor": (1 + again) * square * self.tokens * (h + q + h + f) / depth,
            "row/tensor": (1 + again) * square * self.weights,
            "c/tensor": (on.c - 1) / on.box * self.tokens * (4 * h + again * 2 * h),
            "b/tensor": (on.b - 1) / on.box * self.tokens * ((2 * q + 2 * k + 3 * f) + again * (q + f)),
            "a/tensor": (on.a - 1) / on.box * self.weights * (1 + again),
            # A number for each row of the stream, summed over the ranks that have features of it; of two norms.
            "col/norms": 2 * 2 * (on.row - 1) / on.row * self.tokens / (on.row * on.depth),
            "b/norms": 2 * 2 * (on.b - 1) / on.b * self.tokens / (on.a * on.c),
        }


@RANKS
def test_one_block(ranks: int, workers: str, request: pytest.FixtureRequest) -> None:
    lines = [f"tp={ranks}:{kind}" for kind in LINES[ranks]]
    for found in request.getfixturevalue(workers).run(of_blocks, lines, SHAPE, ranks=ranks):
        for line, passes in found.items():
            block = Block(SHAPE, TOKENS, line)
            for backward, words in enumerate(passes):
                assert words == exactly(block.words(bool(backward))), f"{line}, {('forward', 'backward')[backward]}"


def test_key_value_heads_that_several_ranks_have_move_as_often(eight: Pool) -> None:
    lines = ["tp=8:1x2x4", "tp=8:2x1x4"]
    for found in eight.run(of_blocks, lines, SHARED):
        for line, passes in found.items():
            for backward, words in enumerate(passes):
                assert words == exactly(Block(SHARED, TOKENS, line).words(bool(backward))), line


# ---- a step ------------------------------------------------------------------------------------------------


def config() -> Config:
    return load(Path(__file__).parents[2] / "runs" / "tiny.toml", ("model.layers=2", "data.seq_len=8"))


def of_a_step(world: World, line: str) -> Words:
    """The second one, in which nothing is checked any more."""
    engine = make_engine(config(), Layout.parse(f"{line},dtype=float64"), world)
    for step in range(2):
        taken(world.ledger)
        engine.step(open_data(config()).batch(step))
    return taken(world.ledger)


@pytest.mark.parametrize(
    "line",
    [
        "tp=4:2d",
        "tp=4:2d{form=loop}",
        "tp=4:2x1x2",
        "tp=8:2.5d/2",
        "tp=8:3d",
        pytest.param("tp=8:4x2x1", marks=pytest.mark.parity),
        pytest.param("tp=8:1x4x2", marks=pytest.mark.parity),
    ],
)
def test_a_step(line: str, eight: Pool) -> None:
    """Blocks; embedding and loss, each with M·h of the stream and V·h of their matrix both ways, and the loss with the
    logits where their terms are summed and three numbers a row from each other rank that divides the vocabulary. Of a
    2.5-D grid all matrices' gradients are summed over depth."""
    on, shape = Sides.of(line), config().model
    tokens, layers, h = config().data.batch * config().data.seq_len, shape.layers, shape.hidden  # type: ignore[operator]
    block, table = Block(shape, tokens, line), shape.vocab * shape.hidden
    expected = Counter({key: layers * words for key, words in block.words(False).items()})
    expected.update({key: layers * words for key, words in block.words(True).items()})
    square = (on.row - 1) / on.row**2
    expected.update(
        {
            "col/tensor": 4 * square * tokens * h / on.depth + 3 * (on.row - 1) * tokens / (on.row * on.depth),
            "row/tensor": 4 * square * table,
            "c/tensor": 4 * (on.c - 1) / on.box * tokens * h + 3 * (on.c - 1) * tokens / (on.a * on.b),
            "b/tensor": 2 * (on.b - 1) / on.box * tokens * shape.vocab,
            "a/tensor": 4 * (on.a - 1) / on.box * table,
        }
    )
    for key in ("col/norms", "b/norms"):
        expected[key] *= (2 * layers + 1) / (2 * layers)  # and the last one
    matrices, norms = layers * block.weights + 2 * table, (2 * layers + 1) * h
    expected["depth/gradients"] += 2 * (on.depth - 1) / on.depth * matrices / on.row**2
    ranks = Layout.parse(line).ranks
    rows, attended = on.depth * on.row * on.a * on.c, on.depth * on.row * on.a * on.b
    expected[f"{label(on, 'depth', 'row', 'a', 'c')}/gradients"] += ring(rows) * norms / (on.row * on.b)
    expected[f"{label(on, 'depth', 'row', 'a', 'b')}/loss"] += ring(attended)
    expected["world/norm"] += ring(ranks)
    assert eight.run(of_a_step, line, ranks=ranks) == [exactly(expected)] * ranks


def label(on: Sides, *axes: str) -> str:
    return "·".join(axis for axis in axes if getattr(on, axis) > 1)


def ring(ranks: int) -> float:
    """The words of an all-reduce, for each of its elements."""
    return 2 * (ranks - 1) / ranks
