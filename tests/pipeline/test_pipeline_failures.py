"""What a pipeline says when something goes wrong in it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_ranks import SCALE, Pipeline, small_batches
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.errors import LayoutError, RankFailed
from shoal.model.task import PlainTask
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.train.pool import Pool


class Layer(nn.Module):
    """Multiplies by its weight, and from its call number ``at`` on also does ``what`` it is told."""

    def __init__(self, what: Callable[[Tensor], Any], at: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.what, self.calls, self.at = what, 0, at

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.what(self.weight * x) if self.calls > self.at else self.weight * x


class Boom(Exception):
    pass


def boom(x: Tensor) -> Tensor:
    raise Boom


def boom_in_backward(x: Tensor) -> Tensor:
    x.register_hook(boom)
    return x * 1


def sleep(x: Tensor) -> Tensor:
    time.sleep(3)
    return x


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def nothing(x: Tensor) -> None:
    return None


def whole_numbers(x: Tensor) -> Tensor:
    return x.long()


def many_dims(x: Tensor) -> Tensor:
    return x[(None,) * 7]


def large(x: Tensor) -> Tensor:
    """Of a shape that depends on values."""
    return x[x > 0.3]


def cut_off(x: Tensor) -> Tensor:
    return x.detach()


def train(world: World, what: Callable[[Tensor], Any], at: int) -> tuple[float, float | None]:
    """A step of four micro-batches through one layer a rank, of which that of rank 1 does something. Returns the loss
    and the gradient of this rank's weight."""
    net = nn.Sequential(*(Layer(what, at if rank == 1 else 99) for rank in range(world.size)))
    task = PlainTask(net, lambda output, batch: output.square().sum())
    pipeline = Pipeline(world, task, range(world.size), one_f_one_b(world.size, 4))
    loss, grad = pipeline.train(small_batches(4, 2)), net[world.rank].weight.grad
    return loss, None if grad is None else grad.item()


@pytest.mark.parametrize(("what", "direction"), [(boom, "forward"), (boom_in_backward, "backward")])
def test_an_error_says_in_which_action_of_which_rank_it_arose(
    pool: Pool, what: Callable[[Tensor], Tensor], direction: str
) -> None:
    pattern = rf"rank 1 raised:(.|\n)*Boom\nin the {direction} pass of stage 1, micro-batch 2"
    with pytest.raises(RankFailed, match=pattern):
        pool.run(train, what, 2, ranks=3)


def test_a_silent_rank_is_named_with_what_was_expected_of_it(pool: Pool) -> None:
    """By whichever of its neighbours gives up first."""
    with pytest.raises(RankFailed, match=r"rank [02] raised:(.|\n)*Timed out") as failure:
        pool.run(train, sleep, 1, ranks=3, timeout_s=1)
    after, before = "the input of stage 2, micro-batch 1", "the gradient of the output of stage 0, micro-batch 0"
    told = str(failure.value)
    assert any(f"nothing from rank 1 while receiving {what}\nin the " in told for what in (after, before)), told


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (pair, "layer 1, the last of stage 1, returns a tuple; stages hand over one floating-point tensor"),
        (nothing, "layer 1, the last of stage 1, returns a NoneType; "),
        (whole_numbers, "layer 1, the last of stage 1, returns int64 [2, 3] without gradient; "),
        (many_dims, "layer 1, the last of stage 1, returns float64 [1, 1, 1, 1, 1, 1, 1, 2, 3]; "),
        (large, "stage 1 made float64 ["),
        (cut_off, "stage 1 made float64 [2, 3] of one micro-batch and float64 [2, 3] without gradient of another"),
    ],
)
def test_what_cannot_go_from_stage_to_stage_is_refused(pool: Pool, what: Callable[[Tensor], Any], found: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(f"layout.pp = 3: {found}") + ".*; use pp=1"):
        pool.run(train, what, 1 if what is cut_off else 0, ranks=3)


def test_a_stage_whose_output_does_not_depend_on_its_input_answers_with_zero(pool: Pool) -> None:
    (_, first), (_, second), (loss, third) = pool.run(train, cut_off, 0, ranks=3)
    assert (first, second) == (0, None)
    assert third == pytest.approx(2 * SCALE * loss)


def test_the_last_stage_may_make_what_its_loss_can_use(pool: Pool) -> None:
    """Here whole numbers, which have no gradient."""
    (_, first), (loss, second) = pool.run(train, whole_numbers, 0, ranks=2)
    assert loss > 0
    assert (first, second) == (0, None)
