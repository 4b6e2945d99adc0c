"""What becomes of a user's own module with an example, before anything of it is divided."""

from __future__ import annotations

import pytest
import torch
from own_modules import MLP, Batch, Odd, batches, loss
from torch import nn

import shoal
from shoal.build import interpreter_of
from shoal.errors import ConfigError, LayoutError
from shoal.layout import Layout
from shoal.model.task import Task
from shoal.own import interpreter_for, task_of
from shoal.trace.task import TracedTask

CPU = torch.device("cpu")


def task(module: nn.Module, line: str, example: Batch) -> Task:
    return task_of(module, loss, None, example, Layout.parse(line), CPU)


@pytest.mark.parametrize(
    ("module", "line", "traced"),
    [
        (MLP(), "dp=2", False),
        (MLP(), "pp=2", True),
        (MLP(), "dp=1,tp=2", True),
        (nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 5)), "pp=2", False),  # layers already
        (nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 5)), "dp=1,tp=2", True),
    ],
)
def test_only_what_a_layout_divides_is_traced(module: nn.Module, line: str, traced: bool) -> None:
    assert isinstance(task(module.double(), line, batches("mlp", 1, 4)[0]), TracedTask) == traced


def test_a_layout_that_needs_what_is_not_told_is_refused() -> None:
    example = batches("mlp", 1, 4)[0]
    with pytest.raises(LayoutError, match="use recompute=full"):
        task(MLP().double(), "dp=1,tp=2,recompute=selective", example)
    layout = Layout.parse("dp=1,tp=2:1d-sp")
    with pytest.raises(LayoutError, match=r"layout.tp = 2:1d-sp: the stream .*; use tp=2"):
        interpreter_for(layout, task(MLP().double(), "dp=1,tp=2:1d-sp", example))
    with pytest.raises(LayoutError, match="give Engine an example=batch"):
        interpreter_of(Layout.parse("dp=1,tp=2"), {})


def test_a_persistent_buffer_that_several_layers_read_is_refused_in_a_pipeline() -> None:
    example = batches("odd", 1, 4)[0]
    module = Masked().double()
    task(module, "dp=1,tp=2", example)
    with pytest.raises(LayoutError, match=r"several layers read the buffer mask, .* register it with persistent=False"):
        task(module, "pp=2", example)


class Masked(nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.register_buffer("mask", torch.ones(5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) * self.mask
        return x


class Fixed(MLP):
    """A number of samples that the code makes a constant of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.ones(len(x), 1)


def test_a_size_that_the_module_fixes_is_that_of_the_example() -> None:
    example = batches("mlp", 1, 4)[0]
    found = task(Fixed().double(), "pp=2", example)
    found.context(example)
    with pytest.raises(ConfigError, match=r"shape = \[2, 7\]: the module was traced with inputs of \[4, 7\]"):
        found.context({key: one[:2] for key, one in example.items()})
    task(MLP().double(), "pp=2", example).context({key: one[:2] for key, one in example.items()})


def test_describe_is_a_table() -> None:
    lines = shoal.describe(Odd(), torch.randn(3, 5, 16)).splitlines()
    assert "q       qkv, 4 heads of 2 groups" in lines
    assert "head    head" in lines
