from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from tensor_ranks import Array, Kept, assert_same, settle
from torch import Tensor, nn

from shoal.comm.collectives import Pending
from shoal.comm.differentiable import Arriving, pad, part_size
from shoal.comm.world import Group, World
from shoal.layout.kinds import split_evenly
from shoal.meter import Meter
from shoal.model.linear import attach_sink
from shoal.tensor import blocks
from shoal.tensor.linear import DividedLinear
from shoal.tensor.ports import Even, Extent, Port, Ports, Positions, Shares, Still
from shoal.train.pool import Pool

# ---- any choice of ports -----------------------------------------------------------------------------------

SAMPLES, LENGTH, IN, OUT = 12, 5, 11, 4


@dataclass(frozen=True)
class Choice:
    """How the input, the weight and the output of one linear map lie on ``ranks`` ranks that all compute all of it:
    what each divides along (None: every rank has it, or keeps its own)."""

    ranks: int
    x: int
    weight: int | None
    y: int | None

    def ports(self, group: Group) -> Ports:
        return Ports(self._port(self.x, group), self._port(self.weight, group), self._port(self.y, group))

    def part(self, whole: Tensor, dim: int | None, rank: int) -> Tensor:
        if dim is None:
            return whole.clone()
        if dim == 1 and whole.ndim == 3:
            size = part_size(LENGTH, self.ranks)
            return pad(whole, 1, size * self.ranks)[:, rank * size :][:, :size].clone()
        return whole.split(split_evenly(whole.shape[dim], self.ranks), dim)[rank].clone()

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input, weight, bias and the gradient of the output."""
        generator = torch.Generator().manual_seed(3)
        shapes = (SAMPLES, LENGTH, IN), (OUT, IN), (OUT,), (SAMPLES, LENGTH, OUT)
        return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]

    def _port(self, dim: int | None, group: Group) -> Port:
        if dim is None:
            return Still()
        if dim == 0:
            return Even(group, 0)
        # In-features are uneven, of the input and of the weight; the weight's dim 1 is positions of no input.
        return Positions(group, extent=Extent(LENGTH)) if dim == 1 else Shares(group, -1, split_evenly(IN, group.size))


def compute(world: World, choice: Choice, sink: bool) -> list[Array]:
    """This rank's output, and the gradients of its input, weight and bias."""
    x, weight, bias, grad = choice.tensors()
    x = choice.part(x, choice.x, world.rank).requires_grad_()
    linear = nn.Linear(IN, OUT, device="meta")
    linear.weight = nn.Parameter(choice.part(weight, choice.weight, world.rank))
    linear.bias = nn.Parameter(bias)
    if sink:
        attach_sink(linear.weight, kept := Kept())
    y = DividedLinear(linear, choice.ports(world.everyone)).block(x)
    y.backward(choice.part(grad, choice.y, world.rank))
    assert (linear.weight.grad is None) == sink
    of_weight = kept.gradient if sink else linear.weight.grad
    return [one.detach().numpy() for one in (y, x.grad, of_weight, linear.bias.grad)]  # type: ignore[union-attr]


CHOICES = [
    Choice(ranks, x, weight, y)
    for ranks in (2, 3, 4)
    for x in (0, 1, -1)
    for weight in (None, -1)
    for y in (None, 0, 1)
]


@pytest.mark.parametrize("sink", [False, True], ids=["autograd", "sink"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_whatever_enters_and_leaves_is_the_linear_map_and_its_transposes(
    pool: Pool, choice: Choice, sink: bool
) -> None:
    """Each rank computes all of the map. Where its result leaves, ranks add up as many; where it stays, each has a
    gradient of it, and those of what entered add up."""
    x, weight, bias, grad = choice.tensors()
    times = choice.ranks
    wanted_y = (x @ weight.t()) * (1 if choice.y is None else times) + bias
    wanted_x = grad @ weight * times
    wanted_weight = grad.flatten(0, 1).t() @ x.flatten(0, 1) * (1 if choice.weight is None else times)
    for rank, found in enumerate(pool.run(compute, choice, sink, ranks=choice.ranks)):
        y, of_x, of_weight, of_bias = found
        part_y = choice.part(wanted_y, choice.y, rank)
        if choice.y == 1:  # a bias is added to padding too
            own = min(max(LENGTH - rank * part_y.shape[1], 0), part_y.shape[1])
            y, part_y = y[:, :own], part_y[:, :own]
        assert_same(y, part_y, "output")
        assert_same(of_x, choice.part(wanted_x, choice.x, rank), "gradient of the input")
        assert_same(of_weight, choice.part(wanted_weight, choice.weight, rank), "gradient of the weight")
        assert_same(of_bias, choice.part(grad, choice.y, rank).sum((0, 1)), "gradient of the bias")


# ---- what runs while what is under way ---------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """A port on one rank that says when it moves ``what``."""

    what: str
    said: list[str]
    dim: int = 0
    parts: int = 1
    sums: bool = True

    def own(self, whole: Tensor, padding: float) -> Tensor:
        return whole

    def full(self, part: Tensor) -> int:
        return part.shape[0]

    def start_enter(self, part: Tensor, length: int) -> Arriving[Tensor]:
        return self._start("enters", part)

    def start_leave(self, term: Tensor) -> Arriving[Tensor]:
        return self._start("leaves", term)

    def _start(self, how: str, x: Tensor) -> Arriving[Tensor]:
        self.said.append(f"{self.what} {how}")

        def arrange() -> Tensor:
            self.said.append(f"has {self.what}" if how == "enters" else f"{self.what} has left")
            return x

        return Arriving(Pending(None), arrange)


class ToldPending(Pending):
    """Has nothing to wait for, and says when it is waited for."""

    def __init__(self, said: list[str], words: str) -> None:
        super().__init__(None)
        self.told = lambda: said.append(words)

    def wait(self) -> None:
        self.told()


@contextmanager
def told_blocks(what: str, said: list[str]) -> Iterator[None]:
    """Blocks of ``what`` say when they move, on one rank."""

    def gather(out: Tensor, part: Tensor, *_: object) -> Pending:
        said.append(f"{what} enters")
        out.copy_(part.view(-1))
        return ToldPending(said, f"has {what}")

    def scatter(out: Tensor, room: Tensor, *_: object) -> Pending:
        said.append(f"{what} leaves")
        out.view(-1).copy_(room)
        return ToldPending(said, f"{what} has left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "start_all_gather", gather)
        patch.setattr(blocks, "start_reduce_scatter", scatter)
        yield


@dataclass(frozen=True)
class TwoBlocks(Even):
    """Of a weight that lies on two ranks, but is told of on one."""

    parts = 2  # type: ignore[assignment]


@dataclass(frozen=True)
class ToldSink:
    """Says when it takes a gradient, and in which form."""

    said: list[str]

    def later(self, contribution: Callable[[], None]) -> bool:
        return False

    def add_arriving(self, arrive: Callable[[], Tensor]) -> None:
        self.said.append("will add")

    def add_product(self, left: Tensor, right: Tensor) -> None:
        self.said.append("multiplies")


@dataclass
class Script:
    """What a linear map says, forward and backward."""

    moves: str = "x w y"
    needs_x: bool = True
    needs_weight: bool = True
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        said: list[str] = []
        x, y = (Told(what, said) if what in self.moves else Still() for what in "xy")
        weight = TwoBlocks(World().everyone, -1) if "w" in self.moves else Still()
        linear = nn.Linear(3, 4)
        linear.weight.requires_grad_(self.needs_weight)
        attach_sink(linear.weight, ToldSink(said))  # type: ignore[arg-type]
        with told_blocks("w", said):
            out = DividedLinear(linear, Ports(x, weight, y)).block(torch.randn(1, 2, 3, requires_grad=self.needs_x))
            self.forward = said.copy()
            said.clear()
            out.sum().backward()
        self.backward = said


def test_input_and_weight_are_under_way_together() -> None:
    assert Script().forward == ["x enters", "w enters", "has x", "has w", "y leaves", "y has left"]


def test_the_input_comes_back_while_its_gradient_is_made_which_leaves_while_the_weights_is_and_that_is_on_its_way() -> (
    None
):
    assert Script().backward == [
        "y enters", "w enters", "x enters", "has y", "has w", "x leaves", "has x", "w leaves", "will add", "x has left",
    ]  # fmt: skip


def test_of_one_dimension_only_the_stream_moves() -> None:
    first, second = Script("x"), Script("y")
    assert first.forward == ["x enters", "has x"]
    assert first.backward == ["x enters", "x leaves", "has x", "multiplies", "x has left"]
    assert second.forward == ["y leaves", "y has left"]
    assert second.backward == ["y enters", "has y", "multiplies"]


def test_frozen_weights_and_inputs_move_nothing_for_their_gradients() -> None:
    frozen = Script(needs_weight=False)
    assert frozen.backward == ["y enters", "w enters", "has y", "has w", "x leaves", "x has left"]
    first = Script(needs_x=False)
    assert first.backward == ["y enters", "x enters", "has y", "has x", "w leaves", "will add"]


# ---- memory ------------------------------------------------------------------------------------------------


def kept_for_the_backward_pass(world: World) -> dict[str, float]:
    """Elements alive after a pass through a pair of linears of one dimension, in elements of this rank's stream."""
    length, hidden = 16, 10
    stream = Positions(world.everyone, extent=Extent(length))
    x = torch.randn(2, length // world.size, hidden, requires_grad=True)
    found = {}
    with Meter() as meter:
        meter.label("given", [x])
        first = DividedLinear(nn.Linear(hidden, hidden // 2, bias=False), Ports(stream, Still(), Still()))
        second = DividedLinear(nn.Linear(hidden // 2, hidden, bias=False), Ports(Still(), Still(), stream))
        meter.label("weights", [first.weight, second.weight])
        with meter.phase("forward"):
            middle = first(x)
            settle(meter, x.nbytes)
            found["first"] = meter.live("activations")
            y = second(middle)
            settle(meter, 2 * x.nbytes)
            found["pair"] = meter.live("activations")
    del y
    return {name: nbytes / 4 / x.numel() for name, nbytes in found.items()}


def test_the_gathered_input_is_not_kept(pool: Pool) -> None:
    """Half of all columns of all positions come out of the first linear, as many elements as a rank's stream."""
    assert pool.run(kept_for_the_backward_pass, ranks=2) == [{"first": 1, "pair": 2}] * 2


def kept_of_a_gathered_weight(world: World) -> int:
    """Elements alive after a pass through a linear whose input and weight are gathered."""
    x = torch.randn(2, 3, IN, requires_grad=True)
    with Meter() as meter:
        meter.label("given", [x])
        ports = Ports(Even(world.everyone, -1), Even(world.everyone, -1), Still())
        linear = DividedLinear(nn.Linear(IN, 7, bias=False), ports)
        meter.label("weights", [linear.weight])
        with meter.phase("forward"):
            y = linear(x)
        settle(meter, y.nbytes)
        kept = meter.live("activations")
    del y
    return kept // 4


def test_of_a_gathered_input_and_weight_nothing_is_kept_but_the_output(pool: Pool) -> None:
    assert pool.run(kept_of_a_gathered_weight, ranks=2) == [2 * 3 * 7] * 2


def peaks_of_forward_passes(world: World) -> dict[str, int]:
    """Most elements alive at one moment besides what is given, of 4 samples of 8 positions, from 16 features to 64 or,
    where in-features lie on both ranks, from 32."""
    group, found = world.everyone, {}
    stream, features = Positions(group, extent=Extent(8)), Even(group, -1)
    for name, length, ports in (
        ("positions", 4, Ports(stream, Still(), Still())),
        ("features", 8, Ports(features, features, Still())),
        ("terms", 8, Ports(features, features, Even(group, 0))),
    ):
        x = torch.randn(4, length, 16, requires_grad=True)
        linear = DividedLinear(nn.Linear(16, 64, bias=False), ports)
        seen = []
        for _ in range(8):  # gloo's threads let go of a tensor some moments after they have sent it
            with Meter() as meter:
                meter.label("given", [x, linear.weight])
                given = meter.live()
                linear(x)
            seen.append(meter.peak() - given)
        found[name] = min(seen) // 4
    return found


def test_what_was_gathered_is_there_once_and_goes_before_terms_leave(pool: Pool) -> None:
    """Whole inputs and weights beside the output; then that and the part of it that comes from the other rank, twice:
    as it comes, and added."""
    x, y, weight = 4 * 8 * 16, 4 * 8 * 64, 2 * 64 * 16
    expected = {"positions": x + y, "features": 2 * x + weight + y, "terms": max(2 * x + weight + y, y + y // 2 * 2)}
    assert pool.run(peaks_of_forward_passes, ranks=2) == [expected] * 2
