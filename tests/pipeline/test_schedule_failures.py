"""A stage that raises or dies ends the run, whatever is under way between ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.engine import Engine
from shoal.errors import RankFailed
from shoal.layout import Layout
from shoal.train.pool import Pool

LINES = ("pp=3:zb-v,mb=6", "pp=3:2bw,mb=3", "pp=3:pipedream,mb=2")


class Boom(Exception):
    pass


def boom(_: Tensor) -> NoReturn:
    raise Boom


def die(_: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Layer(nn.Module):
    """A linear layer that from its call number ``at`` on does ``what`` in its forward or its backward pass."""

    def __init__(self, what: Callable[[Tensor], object] | None, at: int, backward: bool) -> None:
        super().__init__()
        self.linear, self.what, self.at, self.backward = nn.Linear(4, 4), what, at, backward
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.calls += 1
        if self.what is not None and self.calls > self.at:
            if self.backward:
                y.register_hook(self.what)  # type: ignore[arg-type]
            else:
                self.what(y)
        return y


def train(world: World, line: str, what: Callable[[Tensor], object], at: int, backward: bool) -> None:
    """Ten steps, of which the layer of stage 1 does not finish one."""
    torch.manual_seed(0)
    layout = Layout.parse(line)
    net = nn.Sequential(*(Layer(what if stage == 1 else None, at, backward) for stage in range(layout.stages)))
    engine = Engine(
        net, layout, optimizer=Optimizer(name="sgd", lr=0.01), loss=lambda y, _: y.square().sum(), world=world
    )
    for _ in range(10):
        engine.step({"inputs": torch.ones(2 * layout.mb, 4)})
    engine.drain()


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_stage_that_raises_ends_the_run_with_its_own_error(line: str, backward: bool, at: int, pool: Pool) -> None:
    """Not with that of a rank that waits for it in vain."""
    with pytest.raises(RankFailed) as failure:
        pool.run(train, line, boom, at, backward, ranks=3)
    told = str(failure.value)
    assert told.startswith("rank 1 raised:"), told
    assert "Boom" in told
    words = ("forward",) if not backward else ("backward", "input-gradient")
    assert any(f"in the {word} pass of stage 1, micro-batch " in told for word in words), told


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("at", [0, 5])
def test_a_stage_that_is_killed_ends_the_run(line: str, at: int, pool: Pool) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 .*SIGKILL"):
        pool.run(train, line, die, at, False, ranks=3)
