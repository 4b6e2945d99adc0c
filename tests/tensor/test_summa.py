from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.comm.collectives import Pending
from shoal.comm.ledger import Ledger
from shoal.comm.world import Group, World
from shoal.meter import Meter
from shoal.model.linear import attach_sink
from shoal.tensor import summa as summa_module
from shoal.tensor.summa import summa
from shoal.train.pool import Pool

Array = np.ndarray[Any, Any]


def square(world: World, side: int) -> tuple[int, int, Group, Group]:
    """This rank's row and column of the grid, and the ranks across its row and down its column."""
    i, j = divmod(world.rank, side)
    across = world.group(tuple(range(i * side, (i + 1) * side)), "col")
    return i, j, across, world.group(tuple(range(j, side * side, side)), "row")


# ---- whole numbers, block by block -------------------------------------------------------------------------

X = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
W_KN = [[1, 0, 2, 1], [0, 1, 1, 0], [1, 1, 0, 1], [2, 0, 1, 1]]
GRAD = [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]]

Y = [[[12, 5], [28, 13]], [[8, 8], [24, 20]], [[44, 21], [60, 29]], [[40, 32], [56, 44]]]
GRAD_X = [[[2, 0], [2, 2]], [[2, 3], [1, 1]], [[1, 1], [3, 1]], [[2, 2], [1, 2]]]
GRAD_W_KN = [[[10, 14], [12, 16]], [[18, 14], [20, 16]], [[14, 18], [16, 20]], [[22, 18], [24, 20]]]

PRODUCTS = {
    "Y": [
        [[[1, 2], [5, 6]], [[11, 3], [23, 7]]],
        [[[4, 1], [16, 5]], [[4, 7], [8, 15]]],
        [[[9, 10], [13, 14]], [[35, 11], [47, 15]]],
        [[[28, 9], [40, 13]], [[12, 23], [16, 31]]],
    ],
    "dX": [
        [[[1, 0], [0, 1]], [[1, 2], [1, 0]]],
        [[[1, 0], [2, 1]], [[1, 1], [0, 1]]],
        [[[1, 1], [0, 0]], [[2, 2], [0, 0]]],
        [[[0, 0], [3, 1]], [[0, 0], [1, 2]]],
    ],
    "dW": [
        [[[1, 5], [2, 6]], [[3, 7], [4, 8]]],
        [[[5, 1], [6, 2]], [[7, 3], [8, 4]]],
        [[[9, 9], [10, 10]], [[11, 11], [12, 12]]],
        [[[13, 13], [14, 14]], [[15, 15], [16, 16]]],
    ],
}
"""What each step multiplies, by rank and step; dW as [in, out]."""


class Products(TorchDispatchMode):
    """Keeps what each product gives, without what it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(
        self, op: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = args[0].clone() if op is torch.ops.aten.addmm_.default else 0
        out = op(*args, **kwargs or {})
        if op in (torch.ops.aten.addmm_.default, torch.ops.aten.mm.default):
            self.found.append(out - before)
        return out


def of_whole_numbers(world: World, dtype: torch.dtype) -> dict[str, Any]:
    i, j, across, down = square(world, 2)

    def block(whole: list[list[int]]) -> Tensor:
        return torch.tensor(whole, dtype=dtype)[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]

    x, weight = block(X).requires_grad_(), block(W_KN).t().contiguous().requires_grad_()
    with Products() as products:
        y = summa(x, weight, None, across, down, (2, 2))
        y.backward(block(GRAD))
    assert x.grad is not None
    assert weight.grad is not None
    steps = [product.tolist() for product in products.found[:4]]
    steps += [product.t().tolist() for product in products.found[4:]]
    return {"y": y.tolist(), "x": x.grad.tolist(), "weight": weight.grad.t().tolist(), "steps": steps}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_whole_numbers_come_out_exactly_step_by_step(pool: Pool, dtype: torch.dtype) -> None:
    for rank, found in enumerate(pool.run(of_whole_numbers, dtype)):
        assert found["y"] == Y[rank]
        assert found["x"] == GRAD_X[rank]
        assert found["weight"] == GRAD_W_KN[rank]
        assert found["steps"] == [product for kind in ("Y", "dX", "dW") for product in PRODUCTS[kind][rank]]


def beside_a_large_bias(world: World) -> bool:
    """Whether the output is rounded as a sum of rounded terms is that is made in float32, and then rounded."""
    i, j, across, down = square(world, 2)
    generator = torch.Generator().manual_seed(world.size)
    x, weight = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    terms = [(x[:, half].double() @ weight[:, half].double().t()) for half in (slice(32), slice(32, 64))]
    exact = (sum(terms) + 100.0)[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]  # type: ignore[operator]
    places = slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32)
    own_weight, bias = weight[places[1], places[0]].contiguous(), torch.full((32,), 100.0).bfloat16()
    y = summa(x[places].contiguous(), own_weight, bias, across, down, (32, 32)).double()
    half = torch.finfo(torch.bfloat16).eps / 2
    rounding = exact.abs() * half + sum(term.abs() for term in terms)[places] * half  # type: ignore[index]
    return bool(((y - exact).abs() <= rounding * (1 + 1e-3)).all())


def test_sums_are_not_made_in_half_precision_and_a_bias_comes_last(pool: Pool) -> None:
    assert pool.run(beside_a_large_bias) == [True] * 4


# ---- any numbers, of any sizes -----------------------------------------------------------------------------

LENGTH = 3


@dataclass(frozen=True)
class Case:
    """Samples by row of the grid, in-features by both, out-features by column; what there is beside x and weight."""

    samples: tuple[int, ...]
    widths: tuple[int, ...]
    columns: tuple[int, ...]
    bias: bool = False
    needs: frozenset[str] = frozenset({"x", "weight", "bias"})
    sink: bool = False

    def whole(self) -> dict[str, Tensor]:
        rows, ins, outs = sum(self.samples), sum(self.widths), sum(self.columns)
        shapes = {"x": (rows, LENGTH, ins), "weight": (outs, ins), "bias": (outs,), "grad": (rows, LENGTH, outs)}
        generator = torch.Generator().manual_seed(rows * ins * outs)
        made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        return {name: x.requires_grad_(name in self.needs) for name, x in made.items() if name != "bias" or self.bias}

    def block(self, i: int, j: int, name: str) -> tuple[slice, ...]:
        samples, outs = at(self.samples, i), at(self.columns, j)
        return {
            "x": (samples, slice(None), at(self.widths, j)),
            "weight": (outs, at(self.widths, i)),
            "bias": (outs,),
            "grad": (samples, slice(None), outs),
        }[name]


def at(sizes: tuple[int, ...], place: int) -> slice:
    start, stop = list(pairwise(accumulate(sizes, initial=0)))[place]
    return slice(start, stop)


@dataclass
class Kept:
    """A sink that keeps a weight's gradient."""

    gradient: Tensor | None = None

    def later(self, contribution: Callable[[], None]) -> bool:
        return False

    def add(self, gradient: Tensor) -> None:
        assert self.gradient is None
        self.gradient = gradient


def of_any_numbers(world: World, case: Case) -> tuple[dict[str, Array | None], list[float], list[float]]:
    """This rank's blocks of the output and of the gradients there are; words received forward and backward."""
    i, j, across, down = square(world, len(case.widths))
    own = {
        name: x.detach()[case.block(i, j, name)].contiguous().requires_grad_(x.requires_grad)
        for name, x in case.whole().items()
    }
    kept = Kept()
    if case.sink:
        attach_sink(own["weight"], kept)  # type: ignore[arg-type]
    y = summa(own["x"], own["weight"], own.get("bias"), across, down, case.widths)
    forward = [world.ledger.words(axis, "tensor") for axis in ("col", "row")]
    world.ledger.clear()
    y.backward(own["grad"])
    backward = [world.ledger.words(axis, "tensor") for axis in ("col", "row")]
    assert world.ledger.words() == sum(backward)
    if case.sink:
        assert own["weight"].grad is None
        own["weight"].grad = kept.gradient
    found = {name: None if x.grad is None else x.grad.numpy() for name, x in own.items() if name != "grad"}
    return {**found, "y": y.detach().numpy()}, forward, backward


def check(pool: Pool, case: Case) -> None:
    whole = case.whole()
    y = F.linear(whole["x"], whole["weight"], whole.get("bias"))
    grad = whole.pop("grad")
    y.backward(grad)
    side, ins = len(case.widths), sum(case.widths)
    for rank, (found, forward, backward) in enumerate(pool.run(of_any_numbers, case, ranks=side**2)):
        i, j = divmod(rank, side)
        same = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        same(found["y"], y.detach()[case.block(i, j, "grad")])
        for name, x in whole.items():
            if x.grad is None:
                assert found[name] is None
            elif name == "bias":  # which the other rows have too, for their samples
                same(found[name], grad[case.block(i, j, "grad")].sum((0, 1)))
            else:
                same(found[name], x.grad[case.block(i, j, name)])
        # Of the q blocks of this row's X (or column's W), each rank but one receives each.
        of_x = (side - 1) / side * case.samples[i] * LENGTH * ins
        of_weight = (side - 1) / side * case.columns[j] * ins
        assert forward == pytest.approx([of_x, of_weight], rel=1e-14)
        to_x, to_weight = ("x" in case.needs), ("weight" in case.needs)
        assert backward == pytest.approx([of_x * (to_x + to_weight), of_weight * (to_x + to_weight)], rel=1e-14)


@pytest.mark.parametrize(
    "case",
    [
        Case((2, 2), (4, 4), (4, 4)),
        Case((2, 1), (5, 2), (3, 4), bias=True),
        Case((1, 1), (3, 0), (1, 2), bias=True),
        Case((1, 2), (0, 3), (2, 0)),
        Case((2, 1), (5, 2), (3, 4), bias=True, needs=frozenset({"weight", "bias"})),
        Case((2, 1), (5, 2), (3, 4), bias=True, needs=frozenset({"x"})),
        Case((2, 1), (5, 2), (3, 4), bias=True, needs=frozenset({"bias"})),
        Case((2, 1), (5, 2), (3, 4), sink=True),
    ],
    ids=str,
)
def test_blocks_are_those_of_one_process_at_the_words_of_the_formula(pool: Pool, case: Case) -> None:
    check(pool, case)


@pytest.mark.parity
@pytest.mark.parametrize("side", [3, 4])
def test_larger_squares_too(side: int) -> None:
    with Pool(side**2) as pool:
        check(pool, Case((2, 1, 3, 1)[:side], (5, 0, 2, 3)[:side], (3, 4, 1, 2)[:side], bias=True))


def of_a_view(world: World) -> tuple[bool, bool]:
    """Whether an input and a gradient that are not contiguous do as well."""
    *_, across, down = square(world, 2)
    generator = torch.Generator().manual_seed(world.rank)
    weight = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    grad = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64).permute(2, 1, 0)
    view = torch.randn(4, 2, 5, generator=generator, dtype=torch.float64).permute(2, 1, 0).requires_grad_()
    copy = view.detach().contiguous().requires_grad_()
    results = []
    for x, gradient in ((view, grad), (copy, grad.contiguous())):
        y = summa(x, weight, None, across, down, (4, 4))
        results.append((y, *torch.autograd.grad(y, x, gradient)))
    return torch.equal(results[0][0], results[1][0]), torch.allclose(results[0][1], results[1][1], rtol=1e-13)


def test_an_input_may_be_a_view(pool: Pool) -> None:
    assert pool.run(of_a_view) == [(True, True)] * 4


# ---- on one rank of a grid that is not there: what is under way when, and held for how long ----------------


class Told(TorchDispatchMode):
    """Collectives that move nothing; says when each starts ("X0+"), when it is waited for ("X0."), and each product
    ("*")."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def __torch_dispatch__(
        self, op: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if op in (torch.ops.aten.addmm_.default, torch.ops.aten.mm.default):
            self.said.append("*")
        return op(*args, **kwargs or {})

    def broadcast(self, tensor: Tensor, group: Group, purpose: str, source: int) -> Pending:
        return self._start("X" if group.axis == "col" else "W", source, tensor)

    def reduce(self, tensor: Tensor, group: Group, purpose: str, root: int) -> Pending:
        return self._start("dX" if group.axis == "col" else "dW", root, tensor)

    def _start(self, name: str, place: int, tensor: Tensor) -> Pending:
        self.said.append(f"{name}{place}+")
        return Pending(Waited(f"{name}{place}.", self.said, tensor))


@dataclass
class Waited:
    name: str
    said: list[str]
    tensor: Tensor  # which a collective keeps while it is under way

    def wait(self) -> None:
        self.said.append(self.name)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(summa_module, "start_broadcast", told.broadcast)
    monkeypatch.setattr(summa_module, "start_reduce", told.reduce)
    return told


def lines(i: int, j: int, side: int) -> tuple[Group, Group]:
    """Those across and down of the rank (i, j)."""
    ranks = tuple(range(side))
    return Group(ranks, "col", j, Ledger(), {}), Group(ranks, "row", i, Ledger(), {})


def test_the_next_block_and_the_last_sum_are_under_way_while_a_step_multiplies(told: Told) -> None:
    x, weight = torch.ones(4, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    with told:
        y = summa(x, weight, None, *lines(0, 1, 3), (2, 2, 2))
        steps = ["X0+ W0+", "X0. W0. X1+ W1+ *", "X1. W1. X2+ W2+ *", "X2. W2. *"]
        assert told.said == " ".join(steps).split()
        told.said.clear()
        y.sum().backward()
    to_x = ["W0+", "W0. W1+ * dX0+", "W1. W2+ * dX0. dX1+", "W2. X0+ * dX1. dX2+"]
    to_weight = ["X0. X1+ * dX2. dW0+", "X1. X2+ * dW0. dW1+", "X2. * dW1. dW2+", "dW2."]
    assert told.said == " ".join(to_x + to_weight).split()


def test_two_blocks_of_each_kind_are_held_however_many_there_are(told: Told) -> None:
    """Beside what the rank has and what it gives: forward two blocks of X and two of the weight; backward two of the
    weight and two products that are dX's, or two of X and two that are dW's; in between nothing."""
    side, tokens, ins, outs = 6, 7, 3, 5
    x, weight = torch.ones(tokens, ins, requires_grad=True), torch.ones(outs, ins, requires_grad=True)
    with Meter() as meter:
        meter.label("given", [x, weight])
        with meter.phase("forward"):
            y = summa(x, weight, None, *lines(1, 2, side), (ins,) * side)
        given = x.nbytes + weight.nbytes + y.nbytes
        assert meter.peak("forward") - given == 2 * (x.nbytes + weight.nbytes)
        assert meter.live() == given
        grad = torch.ones_like(y)
        with meter.phase("backward"):
            grads = torch.autograd.grad(y, (x, weight), grad)
        given += grad.nbytes + sum(one.nbytes for one in grads)
        assert meter.peak("backward") - given == 2 * (x.nbytes + weight.nbytes)
