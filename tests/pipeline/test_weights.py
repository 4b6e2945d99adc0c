"""Versions of weights: which one a pass sees, when memory is made and when it is used again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from shoal.pipeline.weights import Place, Version, Weights


class Memory:
    """Parameters side by side, as a bucket has them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.params = torch.cat([one.detach().flatten() for one in parameters])
        self.moved = 0
        self._point()

    def move(self, params: Tensor, faces: Sequence[nn.Parameter]) -> None:
        self.moved += params is not self.params
        self.params, self.faces = params, faces
        self._point()

    def _point(self) -> None:
        start = 0
        for one in self.parameters:
            one.data = self.params[start : start + one.numel()].view(one.shape)
            start += one.numel()


class Net:
    """y = b·(a·x): two weights in two memories, of which the second has another parameter before it."""

    def __init__(self, oldest: int = 0) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False)).double()
        first, second = self.module
        self.taken: dict[str, list[Tensor]] = {"a": [], "bias": [], "b": []}
        self.originals = {"a": first.weight, "bias": first.bias, "b": second.weight}
        self.memories = [Memory([first.bias, first.weight]), Memory([second.weight])]
        self.weights = Weights(
            self.module,
            [
                (self.memories[0], [self._place("bias", 0), self._place("a", 2)]),
                (self.memories[1], [self._place("b", 0)]),
            ],
            oldest=oldest,
        )

    def _place(self, name: str, start: int) -> Place:
        return Place(self.originals[name], start, self.taken[name].append)

    def start(self, age: int = 0) -> tuple[Version, Tensor, Tensor]:
        """A forward pass with the weights before the last ``age`` updates: their version, the input, and the output."""
        version = self.weights.older(age)
        version.users += 1
        self.weights.use(version)
        x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        return version, x, self.module(x)

    def finish(self, under_way: tuple[Version, Tensor, Tensor]) -> Tensor:
        """Its backward pass; returns the gradient of the input."""
        version, x, y = under_way
        self.weights.use(version)
        y.sum().backward()
        version.users -= 1
        assert x.grad is not None
        return x.grad

    def update(self, by: float) -> None:
        """Add to every weight, as an optimizer that has masters elsewhere does."""
        new = [memory.params + by for memory in self.memories]
        self.weights.advance()
        for memory, values in zip(self.memories, new, strict=True):
            memory.params.copy_(values)

    def product(self) -> Tensor:
        """b·a of the newest weights."""
        a, b = self.memories[0].params[2:].view(2, 2), self.memories[1].params.view(1, 2)
        return b @ a


def test_a_backward_pass_sees_the_values_that_its_forward_pass_saw() -> None:
    """Whatever has been updated since, and in whatever order passes end."""
    net = Net()
    expected, passes = [], []
    for number in range(4):
        expected.append(net.product().expand(3, -1).clone())
        passes.append(net.start())
        net.update(0.5 * (number + 1))
    for number in (2, 0, 3, 1):
        torch.testing.assert_close(net.finish(passes[number]), expected[number], rtol=1e-15, atol=0)
    assert net.weights.alive == 1


def test_an_update_that_nobody_looks_at_makes_no_memory() -> None:
    net = Net()
    before = [memory.params for memory in net.memories]
    for _ in range(3):
        net.finish(net.start())
        net.update(1.0)
    assert [memory.moved for memory in net.memories] == [0, 0]
    assert all(memory.params is one for memory, one in zip(net.memories, before, strict=True))
    assert net.weights.alive == len(net.weights._versions) == 1


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_there_are_as_many_versions_as_passes_can_tell_apart(behind: int) -> None:
    """With so many passes under way at each update, that many old versions and the newest; the memory of those that
    have served is used again."""
    net, under_way, alive = Net(), [], []
    for number in range(12):
        under_way.append((net.product().expand(3, -1).clone(), net.start()))
        if len(under_way) > behind:
            expected, one = under_way.pop(0)
            torch.testing.assert_close(net.finish(one), expected, rtol=1e-15, atol=0)
        net.update(0.1 * number)
        alive.append(net.weights.alive)
    assert alive == [min(number + 2, behind + 1) for number in range(12)]
    assert len(net.weights._versions) == behind + 1
    places = {version.buffers[0].data_ptr() for version in net.weights._versions}
    assert len(places) == behind + 1


@pytest.mark.parametrize(("age", "behind"), [(1, 0), (2, 0), (1, 2), (3, 1)])
def test_a_forward_pass_may_see_what_was_there_before_the_last_updates(age: int, behind: int) -> None:
    """After ``age`` updates since its micro-batch entered, with ``behind`` passes under way: as many old versions."""
    net, under_way = Net(oldest=age), []
    products = [net.product()] * (age + 1)
    alive = []
    for number in range(12):
        under_way.append((products[-1 - age].expand(3, -1).clone(), net.start(min(age, number))))
        if len(under_way) > behind:
            expected, one = under_way.pop(0)
            torch.testing.assert_close(net.finish(one), expected, rtol=1e-15, atol=0)
        net.update(0.1 * (number + 1))
        products.append(net.product())
        alive.append(net.weights.alive)
    assert alive[-1] == max(alive) == len(net.weights._versions) == age + behind + 1


def test_an_update_that_is_skipped_counts_and_makes_no_version() -> None:
    net = Net(oldest=2)
    first = net.weights.newest
    net.update(1.0)
    second = net.weights.newest
    net.weights.stay()
    assert [net.weights.older(age) for age in range(3)] == [second, second, first]
    net.weights.stay()
    assert [net.weights.older(age) for age in range(3)] == [second] * 3
    assert net.weights.alive == 1
    net.update(1.0)
    assert (net.weights.newest, net.weights.older(1)) == (first, second), "the memory of the first is used again"


def test_where_nothing_is_under_way_only_the_newest_version_is_kept() -> None:
    net = Net(oldest=3)
    for _ in range(3):
        net.update(1.0)
    assert net.weights.alive == 4
    net.weights.settle()
    assert net.weights.alive == 1
    assert net.weights.older(0) is net.weights.newest


def test_memories_know_what_modules_have() -> None:
    net = Net()
    for _ in range(2):
        under_way = net.start()
        net.update(1.0)
        assert [list(memory.faces) for memory in net.memories] == [
            [net.module[0].bias, net.module[0].weight],
            [net.module[1].weight],
        ]
        net.finish(under_way)


def test_several_passes_share_a_version() -> None:
    net = Net()
    first, second = net.start(), net.start()
    net.update(1.0)
    third = net.start()
    assert (first[0].users, third[0].users, net.weights.alive) == (2, 1, 2)
    net.finish(first)
    assert net.weights.alive == 2
    net.finish(second)
    assert net.weights.alive == 1
    net.finish(third)


def test_the_gradient_of_a_version_goes_where_that_of_the_parameter_goes() -> None:
    """And is left nowhere else."""
    net = Net()
    one = net.start()
    net.update(1.0)
    other = net.start()
    net.finish(one)
    net.finish(other)
    for name, shape in (("a", (2, 2)), ("bias", (2,)), ("b", (1, 2))):
        assert [tuple(gradient.shape) for gradient in net.taken[name]] == [shape] * 2
        assert net.originals[name].grad is None
    # The gradient of b is that of the first layer's output, which the update has moved.
    assert not torch.equal(net.taken["b"][0], net.taken["b"][1])
    assert all(parameter.grad is None for version in net.weights._versions for parameter in version.parameters)


def test_a_version_keeps_what_is_attached_to_its_parameter() -> None:
    module = nn.Linear(2, 2)
    module.weight.sink = sink = object()  # type: ignore[assignment]
    memory = Memory([module.weight, module.bias])
    places = [Place(module.weight, 0, lambda _: None), Place(module.bias, 4, lambda _: None)]
    Weights(module, [(memory, places)])
    assert module.weight.sink is sink
    assert getattr(module.bias, "sink", None) is None


def test_a_parameter_of_two_modules_is_one_of_each_version() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    memory = Memory([module[0].weight])
    weights = Weights(module, [(memory, [Place(module[0].weight, 0, lambda _: None)])])
    weights.newest.users += 1
    weights.advance()
    assert module[0].weight is module[1].weight is weights.newest.parameters[0]


def test_what_is_in_no_memory_stays_as_it_is() -> None:
    """Frozen parameters have one version."""
    module = nn.Linear(2, 2)
    frozen = module.bias.requires_grad_(False)
    memory = Memory([module.weight])
    weights = Weights(module, [(memory, [Place(module.weight, 0, lambda _: None)])])
    weights.newest.users += 1
    weights.advance()
    assert module.bias is frozen
