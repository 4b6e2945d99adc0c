"""What a user's own module may be, under layouts that come between it and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import pytest
import torch
from engine_ranks import Held, put_together, weights
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.engine import Engine
from shoal.errors import ConfigError, Diverged
from shoal.layout import Layout
from shoal.train.pool import Pool

SGD = Optimizer(name="sgd", lr=1.0, weight_decay=0.0, clip=0)


def summed(output: Tensor, batch: Any) -> Tensor:
    return output.sum()


def one_weight() -> nn.Module:
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    return module


def part_ways(world: World, line: str) -> list[Held]:
    """On the second rank the loss depends on the last layer alone: its backward pass reaches no other."""

    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach() if world.rank == 1 else x * 1

    torch.manual_seed(0)
    chain = [nn.Linear(3, 3), nn.Linear(3, 3), Cut(), nn.Linear(3, 1)]
    engine = Engine(nn.Sequential(*chain).double(), Layout.parse(line), optimizer=SGD, loss=summed, world=world)
    for step in range(2):
        engine.step({"inputs": torch.full((2, 3), 1.0 + step + world.rank, dtype=torch.float64)})
    return weights(engine)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_of_which_some_do_not_reach_all_layers_agree(zero: int, pool: Pool) -> None:
    truth, ours = (put_together(pool.run(part_ways, f"dp=2,zero={stage},mb=2", ranks=2)) for stage in (0, zero))
    assert truth.keys() == ours.keys()
    assert all(torch.allclose(ours[name], truth[name], rtol=1e-12, atol=0) for name in truth)


def saved_whole(world: World) -> tuple[int, bool]:
    engine = Engine(one_weight(), Layout.parse("dp=2"), optimizer=SGD, loss=summed, world=world)
    engine.step({"inputs": torch.ones(1, 1, dtype=torch.float64)})
    file = BytesIO()
    torch.save(engine.task.module, file)
    size = file.tell()
    file.seek(0)
    again, x = torch.load(file, weights_only=False), torch.ones(1, 1, dtype=torch.float64)
    return size, torch.equal(again(x), engine.task.module(x))


def test_a_module_is_saved_without_what_the_engine_attached_to_it(pool: Pool) -> None:
    """Sinks lead to buffers and to process groups, which no file can hold."""
    for size, same in pool.run(saved_whole, ranks=2):
        assert size < 10_000
        assert same


def reads_nothing(world: World) -> bool:
    engine = Engine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double(), Layout.parse("dp=2,zero=3"),
                    optimizer=SGD, loss=summed, world=world)  # fmt: skip
    seen = [all(p.isnan().all() for p in engine.task.module.parameters())]
    engine.step({"inputs": torch.ones(1, 4, dtype=torch.float64)})
    seen.append(all(p.isnan().all() for p in engine.task.module.parameters()))
    return all(seen)


def test_divided_parameters_are_nan_to_who_reads_them_between_steps(pool: Pool) -> None:
    assert all(pool.run(reads_nothing, ranks=2))


class Twice(nn.Module):
    """Hands on two tensors."""

    def __init__(self, how: type) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> object:
        y = torch.tanh(self.linear(x))
        return {"y": y, "x": x} if self.how is dict else (y, x)


class Once(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, both: object) -> Tensor:
        y, x = both.values() if isinstance(both, dict) else both  # type: ignore[misc]
        return self.linear(y * 2) + x


def two_at_once(world: World, line: str, how: type) -> list[Held]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Twice(how), Once(), nn.Linear(4, 4), Twice(how), Once(), nn.Linear(4, 1)]
    engine = Engine(nn.Sequential(*layers).double(), Layout.parse(line), optimizer=SGD, loss=summed, world=world)
    for step in range(3):
        engine.step({"inputs": torch.full((2, 4), 0.3 + step + world.rank, dtype=torch.float64)})
    return weights(engine)


@pytest.mark.parametrize("how", [tuple, dict])
@pytest.mark.parametrize("line", ["dp=2,zero=3", "dp=2,zero=3,mb=2", "dp=2,zero=3,recompute=full"])
def test_layers_may_hand_on_several_tensors(line: str, how: type, pool: Pool) -> None:
    truth, ours = (put_together(pool.run(two_at_once, one, how, ranks=2)) for one in ("dp=2", line))
    assert all(torch.allclose(ours[name], truth[name], rtol=1e-12, atol=0) for name in truth)


def reads_the_model(world: World) -> float:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()

    def loss(output: Tensor, batch: object) -> Tensor:
        return output.sum() + sum(p.square().sum() for p in module.parameters())

    once = SGD.model_copy(update={"skips": 0})
    engine = Engine(module, Layout.parse("dp=2,zero=3"), optimizer=once, loss=loss, world=world)
    return engine.step({"inputs": torch.ones(2, 4, dtype=torch.float64)}).loss


def test_a_loss_that_reads_divided_parameters_is_told(pool: Pool) -> None:
    with pytest.raises(Diverged, match="nan"):
        pool.run(reads_the_model, ranks=2)


def penalised(world: World, line: str) -> list[Held]:
    """A loss with a penalty on the gradient of the input, which autograd computes in the middle of the forward pass."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        (gradient,) = torch.autograd.grad(output.sum(), batch["inputs"], retain_graph=True)
        return output.square().sum() + 0.1 * gradient.square().sum()

    engine = Engine(module, Layout.parse(line), optimizer=SGD, loss=loss, world=world)
    for step in range(2):
        engine.step({"inputs": torch.full((2, 4), 1.0 + step, dtype=torch.float64, requires_grad=True)})
    return weights(engine)


def test_a_loss_may_differentiate(pool: Pool) -> None:
    (alone,), both = pool.run(penalised, "dp=1", ranks=1), pool.run(penalised, "dp=2", ranks=2)
    truth, ours = put_together([alone]), put_together(both)
    assert all(torch.allclose(ours[name], truth[name], rtol=1e-12, atol=0) for name in truth)


def frozen_part(world: World, line: str) -> tuple[list[Held], bool]:
    """Fine-tuning: most parameters are frozen. Whether this rank keeps only a part of them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()
    for parameter in module[:2].parameters():
        parameter.requires_grad_(False)
    engine = Engine(module, Layout.parse(line), optimizer=SGD, loss=summed, world=world)
    for step in range(2):
        engine.step({"inputs": torch.full((2, 4), 1.0 + step + world.rank, dtype=torch.float64)})
    held = sum(one.tensor.numel() for one in engine.fragments() if one.kind == "weight")
    return weights(engine), held < 30


def test_frozen_parameters_are_divided_too(pool: Pool) -> None:
    truth, ours = (pool.run(frozen_part, line, ranks=2) for line in ("dp=2", "dp=2,zero=3"))
    full, parts = (put_together([held for held, _ in found]) for found in (truth, ours))
    assert all(torch.allclose(parts[name], full[name], rtol=1e-12, atol=0) for name in full)
    assert [small for _, small in truth] == [False, False]
    assert [small for _, small in ours] == [True, True]


def other_samples(world: World) -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double()
    engine = Engine(module, Layout.parse("pp=2"), optimizer=SGD, loss=summed, world=world)
    engine.step({"inputs": torch.full((2, 1), float(world.rank), dtype=torch.float64)})


def test_ranks_of_a_replica_that_are_given_other_samples_are_told(pool: Pool) -> None:
    with pytest.raises(ConfigError, match="ranks of one replica were given different samples"):
        pool.run(other_samples, ranks=2)


def test_a_module_has_one_engine() -> None:
    module = one_weight()
    Engine(module, Layout(), optimizer=SGD, loss=summed)
    with pytest.raises(ConfigError, match="weight belongs to another engine"):
        Engine(module, Layout(), optimizer=SGD, loss=summed)
