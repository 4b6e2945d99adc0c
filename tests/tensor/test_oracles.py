"""One divided linear and one divided loss against numbers that were worked out device by device.

Y[M, N] = X[M, K]·W[K, N]; what a rank holds of W is that block transposed, [out, in]. On an a×b×c grid a rank has the
coordinates (i, k, j) on the mesh axes (a, b, c).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

import pytest
import torch
from grids import grid_of, interpreter, mesh_of
from tensor_ranks import Array, assert_same
from torch import Tensor, nn

from shoal.comm.differentiable import pad, part_size
from shoal.comm.world import World
from shoal.mesh import Coords, Mesh
from shoal.model.context import Context
from shoal.model.loss import LinearCrossEntropy
from shoal.model.roles import Role
from shoal.placement import assemble, holders
from shoal.tensor.grid import OnGrid
from shoal.tensor.linear import DividedLinear
from shoal.tensor.ports import Even, Ports, Still, even
from shoal.tensor.samples import Samples
from shoal.train.pool import Pool

Block = list[list[float]]

X = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
W = [[1, 0, 2, 1], [0, 1, 1, 0], [1, 1, 0, 1], [2, 0, 1, 1]]
GRAD = [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]]


def run(x: Tensor, weight_KN: Tensor, grad: Tensor, ports: Ports) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's blocks of Y, dX and dW, of its blocks of X, W and dY."""
    linear = nn.Linear(*weight_KN.shape, bias=False, device="meta")
    linear.weight = nn.Parameter(weight_KN.t().contiguous())
    x.requires_grad_()
    y = DividedLinear(linear, ports)(x)
    y.backward(grad)
    assert x.grad is not None
    assert linear.weight.grad is not None
    return y.detach(), x.grad, linear.weight.grad.t()


def lists(tensors: tuple[Tensor, ...]) -> tuple[Block, ...]:
    return tuple(tensor.tolist() for tensor in tensors)


def block(z: Tensor, row: int, rows: int, column: int, columns: int) -> Tensor:
    """Number (row, column) of rows×columns blocks."""
    return z.chunk(rows)[row].chunk(columns, 1)[column].clone()


# ---- whole numbers: two dimensions -------------------------------------------------------------------------

TWO_D = {
    (0, 0): ([[12, 5], [28, 13]], [[2, 0], [2, 2]], [[10, 14], [12, 16]]),
    (0, 1): ([[8, 8], [24, 20]], [[2, 3], [1, 1]], [[18, 14], [20, 16]]),
    (1, 0): ([[44, 21], [60, 29]], [[1, 1], [3, 1]], [[14, 18], [16, 20]]),
    (1, 1): ([[40, 32], [56, 44]], [[2, 2], [1, 2]], [[22, 18], [24, 20]]),
}
"""Y, dX and dW at (row, column)."""

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def on_a_square(world: World, dtype: torch.dtype) -> tuple[Block, ...]:
    mesh = Mesh((("row", 2), ("col", 2)), world)
    i, j = mesh.coords["row"], mesh.coords["col"]
    x, weight, grad = (block(torch.tensor(z, dtype=dtype), i, 2, j, 2) for z in (X, W, GRAD))
    return lists(run(x, weight, grad, Ports(Even(mesh.over("col"), -1), Even(mesh.over("row"), -1), Still())))


@DTYPES
def test_two_dimensions_block_by_block(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(on_a_square, dtype) == list(TWO_D.values())


# ---- whole numbers: squares at two depths ------------------------------------------------------------------

Y_BELOW = [[76, 37, 72, 56], [92, 45, 88, 68], [108, 53, 104, 80], [124, 61, 120, 92]]
"""Of the rows at depth 1; those at depth 0 are of the square alone."""
GRAD_W_BELOW = [[42, 46, 50, 46], [44, 48, 52, 48], [46, 50, 54, 50], [48, 52, 56, 52]]
GRAD_W_OF_BOTH = [[52, 60, 68, 60], [56, 64, 72, 64], [60, 68, 76, 68], [64, 72, 80, 72]]


def at_two_depths(world: World) -> tuple[Block, ...]:
    mesh = mesh_of("tp=8:2.5d/2", world)
    k, i, j = (mesh.coords[axis] for axis in ("depth", "row", "col"))
    x = block(torch.arange(1.0, 33.0).view(8, 4), 2 * k + i, 4, j, 2)
    weight = block(torch.tensor(W, dtype=x.dtype), i, 2, j, 2)
    grad = block(torch.tensor(GRAD, dtype=x.dtype).repeat(2, 1), 2 * k + i, 4, j, 2)
    return lists(run(x, weight, grad, Ports(Even(mesh.over("col"), -1), Even(mesh.over("row"), -1), Still())))


def test_squares_at_two_depths_block_by_block_and_the_gradient_of_the_weight_over_both(eight: Pool) -> None:
    """Colossal-AI's 2.5-D leaves out the last sum. Over which ranks it is, follows from where the weight lies."""
    rule = interpreter("tp=8:2.5d/2").place(Role("down"), "down", "weight", (4, 4))
    grid = grid_of("tp=8:2.5d/2")
    found = eight.run(at_two_depths)
    together = []
    for rank, (y, grad_x, grad_w) in enumerate(found):
        depth, place = divmod(rank, 4)
        i, j = divmod(place, 2)
        known_y, known_grad_x, known_grad_w = TWO_D[i, j]
        below = [block(torch.tensor(z), i, 2, j, 2).tolist() for z in (Y_BELOW, GRAD_W_BELOW)]
        assert y == (below[0] if depth else known_y)
        assert grad_x == known_grad_x
        assert grad_w == (below[1] if depth else known_grad_w)
        (who,) = holders(rule, grid, grid.coords(rank))
        total = sum(torch.tensor(found[other][2]) for other in who.summing)
        together.append((rule.at(grid.coords(rank)).pieces[0].box, total.t()))  # type: ignore[union-attr]
    assert assemble((4, 4), together).t().tolist() == GRAD_W_OF_BOTH


# ---- whole numbers: three dimensions -----------------------------------------------------------------------

THREE_D = {
    (0, 0, 0): ([1, 2], [1, 0], [12, 5], [2, 0], [10, 14]),
    (0, 0, 1): ([3, 4], [1, 1], [28, 13], [2, 3], [14, 18]),
    (0, 1, 0): ([5, 6], [2, 1], [8, 8], [2, 2], [18, 14]),
    (0, 1, 1): ([7, 8], [0, 1], [24, 20], [1, 1], [22, 18]),
    (1, 0, 0): ([9, 10], [0, 1], [44, 21], [1, 1], [12, 16]),
    (1, 0, 1): ([11, 12], [2, 0], [60, 29], [2, 2], [16, 20]),
    (1, 1, 0): ([13, 14], [1, 0], [40, 32], [3, 1], [20, 16]),
    (1, 1, 1): ([15, 16], [1, 1], [56, 44], [1, 2], [24, 20]),
}
"""X, W, Y, dX and dW at (i, j, k), one row each."""


def on_a_cube(world: World, dtype: torch.dtype) -> tuple[tuple[int, int, int], tuple[Block, ...]]:
    mesh = mesh_of("tp=8:3d", world)
    i, k, j = (mesh.coords[axis] for axis in "abc")
    x, weight = (torch.tensor([row], dtype=dtype) for row in THREE_D[i, j, k][:2])
    grad = block(torch.tensor(GRAD, dtype=dtype), 2 * i + k, 4, j, 2)
    return (i, j, k), lists((x, weight, *run(x, weight, grad, box_ports(mesh, *"abc"))))


def box_ports(mesh: Mesh, a: str, b: str, c: str) -> Ports:
    """Those of rows [rows, features] that lie over a and c before, over a and b after."""
    return Ports(even(mesh.over(c), 0), even(mesh.over(a), -1), even(mesh.over(b), 0))


@DTYPES
def test_three_dimensions_block_by_block(eight: Pool, dtype: torch.dtype) -> None:
    assert dict(eight.run(on_a_cube, dtype)) == {at: tuple([row] for row in rows) for at, rows in THREE_D.items()}


# ---- any box against its simulation on one process ---------------------------------------------------------

Box = tuple[int, int, int]
Blocks = Mapping[Box, Tensor]


def simulated(x: Tensor, w: Tensor, grad: Tensor, a: int, b: int, c: int) -> tuple[Blocks, Blocks, Blocks]:
    """Y, dX and dW of every device (i, k, j), each from the blocks of the others that it would be sent."""
    places = list(product(range(a), range(b), range(c)))
    x_of = {(i, k, j): block(x, i * c + j, a * c, k, b) for i, k, j in places}
    w_of = {(i, k, j): block(w, k * a + i, a * b, j, c) for i, k, j in places}
    grad_of = {(i, k, j): block(grad, i * b + k, a * b, j, c) for i, k, j in places}
    whole_x = {(i, k, j): torch.cat([x_of[i, k, other] for other in range(c)]) for i, k, j in places}
    whole_w = {(i, k, j): torch.cat([w_of[other, k, j] for other in range(a)]) for i, k, j in places}
    whole_grad = {(i, k, j): torch.cat([grad_of[i, other, j] for other in range(b)]) for i, k, j in places}
    y, grad_x, grad_w = {}, {}, {}
    for i, k, j in places:
        y[i, k, j] = sum(whole_x[i, t, j] @ whole_w[i, t, j] for t in range(b)).chunk(b)[k]  # type: ignore[union-attr]
        terms = [whole_grad[i, k, t] @ whole_w[i, k, t].t() for t in range(c)]
        grad_x[i, k, j] = sum(terms).chunk(c)[j]  # type: ignore[union-attr]
        terms = [whole_x[t, k, j].t() @ whole_grad[t, k, j] for t in range(a)]
        grad_w[i, k, j] = sum(terms).chunk(a)[i]  # type: ignore[union-attr]
    return y, grad_x, grad_w


def drawn(a: int, b: int, c: int) -> tuple[Tensor, Tensor, Tensor]:
    """X, W and dY of different lengths on every device and in all."""
    generator = torch.Generator().manual_seed(a * 100 + b * 10 + c)
    m, k, n = 2 * a * b * c, 3 * a * b, 5 * c
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((m, k), (k, n), (m, n)))  # type: ignore[return-value]


def boxes(ranks: int) -> list[Box]:
    sides = range(1, ranks + 1)
    return [(a, b, c) for a, b, c in product(sides, sides, sides) if a * b * c == ranks]


def on_all_boxes(world: World) -> list[tuple[Box, tuple[Array, ...]]]:
    found = []
    for a, b, c in boxes(world.size):
        mesh = Mesh((("a", a), ("b", b), ("c", c)), world)
        i, k, j = at = tuple(mesh.coords[axis] for axis in "abc")
        x, weight, grad = drawn(a, b, c)
        x, weight = block(x, i * c + j, a * c, k, b), block(weight, k * a + i, a * b, j, c)
        grad = block(grad, i * b + k, a * b, j, c)
        results = run(x, weight, grad, box_ports(mesh, *"abc"))
        found.append((at, tuple(one.numpy().copy() for one in results)))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_box_computes_what_its_simulation_does(eight: Pool, ranks: int) -> None:
    """And the simulation, put together, is the product."""
    found = eight.run(on_all_boxes, ranks=ranks)
    for number, (a, b, c) in enumerate(boxes(ranks)):
        x, w, grad = drawn(a, b, c)
        expected = simulated(x, w, grad, a, b, c)
        for at, results in (of_rank[number] for of_rank in found):
            for name, result, known in zip(("Y", "dX", "dW"), results, expected, strict=True):
                assert_same(result, known[at], f"{name} at {at} of {a}×{b}×{c}")
        for (i, k, j), y in expected[0].items():
            assert_same(y, block(x @ w, i * b + k, a * b, j, c))


def pairs_on_all_boxes(world: World) -> list[tuple[Box, tuple[Array, ...]]]:
    """Two linears, the second with the last two sides exchanged: its result, and the gradient of the input."""
    found = []
    for a, b, c in boxes(world.size):
        mesh = Mesh((("a", a), ("b", b), ("c", c)), world)
        i, k, j = at = tuple(mesh.coords[axis] for axis in "abc")
        x, first, second, grad = pair(a, b, c)
        x, grad = block(x, i * c + j, a * c, k, b), block(grad, i * c + j, a * c, k, b)
        y = x.requires_grad_()
        for weight, axes in (
            (block(first, k * a + i, a * b, j, c), "abc"),
            (block(second, j * a + i, a * c, k, b), "acb"),
        ):
            linear = nn.Linear(1, 1, bias=False)
            linear.weight = nn.Parameter(weight.t().contiguous())
            y = DividedLinear(linear, box_ports(mesh, *axes))(y)
        y.backward(grad)
        assert x.grad is not None
        found.append((at, (y.detach().numpy(), x.grad.numpy())))
    return found  # type: ignore[return-value]


def pair(a: int, b: int, c: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X, both weights, and the gradient of the result."""
    generator = torch.Generator().manual_seed(a * 100 + b * 10 + c)
    m, k, n = 2 * a * b * c, 3 * a * b, 5 * a * c
    shapes = ((m, k), (k, n), (n, k), (m, k))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_after_two_linears_the_stream_lies_as_before(eight: Pool, ranks: int) -> None:
    found = eight.run(pairs_on_all_boxes, ranks=ranks)
    for number, (a, b, c) in enumerate(boxes(ranks)):
        x, first, second, grad = pair(a, b, c)
        expected = x @ first @ second, grad @ second.t() @ first.t()
        for (i, k, j), results in (of_rank[number] for of_rank in found):
            for result, known in zip(results, expected, strict=True):
                assert_same(result, block(known, i * c + j, a * c, k, b), f"{a}×{b}×{c}")


# ---- cross-entropy over a divided vocabulary ---------------------------------------------------------------

LOGITS = [[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 0.0, 1.0]]
TARGETS = [2, 0]
LOSSES = [1.4401897, 1.00640887]
GRAD_LOGITS = [[0.0320586, 0.0871443, -0.7631172, 0.6439143], [-0.6344707, 0.1344707, 0.1344707, 0.3655293]]


def known_logits(world: World, line: str) -> tuple[float, Array]:
    """This rank's loss, and its block of the gradient of the output matrix.

    The hidden states of two samples of one position are the unit vectors, so that the logits are the output matrix,
    transposed, and the gradient of the matrix is that of the logits.
    """
    mesh, on = mesh_of(line, world), interpreter(line)
    placement = on.place(Role("head"), "head", "weight", (4, 2)).at(mesh.coords)
    assert placement is not None
    matrix = torch.tensor(LOGITS, dtype=torch.float64).t()
    local = torch.zeros(placement.shape, dtype=torch.float64)
    for piece in placement.pieces:
        piece.of(local).copy_(matrix[tuple(slice(*span) for span in piece.box)])
    # Before the output matrix is adapted, as one that comes first in its layer is, or that is on a rank without it.
    loss = on.adapt(Role("loss"), LinearCrossEntropy(), mesh)
    ctx = on.localise(Context(None, labels=torch.tensor(TARGETS)[:, None], length=1), mesh.coords)
    x = stream(torch.eye(2, dtype=torch.float64)[:, None], on, mesh.coords)
    local.requires_grad_()
    total = loss(x, local, ctx.labels)
    total.backward()
    assert local.grad is not None
    return total.item(), local.grad.numpy()


def stream(x: Tensor, on: OnGrid, coords: Coords) -> Tensor:
    """This rank's block, padded where sizes do not divide."""
    samples = [(axis, on.sizes[axis]) for axis in on.axes.samples]
    further = [on.sizes[axis] for axis in on.axes.attended if axis not in on.axes.samples]
    x = Samples.over(samples, coords, prod(further)).of(x)
    if on.axes.positions:
        ranks = on.sizes[on.axes.positions]
        size = part_size(x.shape[1], ranks)
        x = pad(x, 1, size * ranks)[:, coords[on.axes.positions] * size :][:, :size]
    return x.chunk(on.sizes[on.axes.hidden], -1)[coords[on.axes.hidden]] if on.axes.hidden else x


LINES = ["tp=2", "tp=2:1d-sp", "tp=4:2d", "tp=8:2.5d/2", "tp=8:3d", "tp=4:1x2x2", "tp=4:2x1x2", "tp=4:2x2x1"]


@pytest.mark.parametrize("line", LINES)
def test_two_positions_over_four_tokens_by_hand(eight: Pool, line: str) -> None:
    """Each rank has the losses of its rows; ranks that have other rows of logits add them up, and their gradients."""
    on, grid = interpreter(line), grid_of(line)
    found = eight.run(known_logits, line, ranks=grid.size)
    rule = on.place(Role("head"), "head", "weight", (4, 2))
    held = []
    for rank in range(grid.size):
        coords = grid.coords(rank)
        of_others = [grid.rank(place) for place in grid.vary(coords, on.loss_axes)]
        assert sum(found[other][0] for other in of_others) == pytest.approx(sum(LOSSES), abs=1e-7)
        placement = rule.at(coords)
        assert placement is not None
        for piece, who in zip(placement.pieces, holders(rule, grid, coords), strict=True):
            total = sum(piece.of(torch.from_numpy(found[other][1])) for other in who.summing)
            held.append((piece.box, total))
    expected = torch.tensor(GRAD_LOGITS, dtype=torch.float64)
    torch.testing.assert_close(assemble((4, 2), held).t(), expected, rtol=0, atol=1e-7)
    if line in ("tp=4:2d", "tp=4:2x1x2"):  # a sample for each row of the grid, or each of a
        for rank, (loss, _) in enumerate(found):
            assert loss == pytest.approx(LOSSES[rank // 2], abs=1e-7)
