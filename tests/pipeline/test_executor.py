from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from shoal.model.task import PlainTask
from shoal.pipeline.executor import Executor, Handlers, Stage
from shoal.pipeline.schedules.single import accumulate, forward_only


class Branchy(nn.Module):
    """A residual layer with a bias that joins late and a product that starts from a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.gain, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain.exp()
        return x + torch.tanh(self.linear(x)) * gain + self.bias.sin()


class Trace:
    """An executor over four layers that share a weight, and the order of everything that happens in a step."""

    def __init__(self, micro_batches: int) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(2, 3), Branchy(), nn.Tanh(), Branchy())
        self.module[3].linear.weight = self.module[1].linear.weight
        self.events: list[str] = []
        for name, parameter in self.module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.events.append(name))
        self.task = PlainTask(self.module, lambda output, batch: (output * batch["targets"]).square().sum())
        layers = tuple((unit, layer) for unit, (_, layer) in enumerate(self.task.layers()))
        handlers = Handlers(
            unit_done=lambda unit, final: self.events.append(f"{'complete' if final else 'done'} {unit}"),
            reduce=lambda stage: self.events.append(f"reduce {stage}"),
            norm=lambda: self.events.append("norm"),
            update=lambda: self.events.append("update"),
        )
        self.executor = Executor(self.task, {0: Stage(layers)}, handlers)
        self.program = accumulate(micro_batches)
        self.batches = [
            {"inputs": torch.randn(4, 2, dtype=torch.float32), "targets": torch.randn(4, 3)}
            for _ in range(micro_batches)
        ]

    def context(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self.events.append("forward")
        return batch

    def train(self) -> Tensor:
        return self.executor.train(self.program, self.batches, self.context, self.scale)

    def scale(self) -> Tensor:
        assert self.events[-1] == "forward", "not before there is a loss to scale"
        return torch.tensor(0.25, dtype=torch.float64)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_units_are_done_last_first_once_their_gradients_of_the_pass_are_in(micro_batches: int) -> None:
    """And complete in the last micro-batch only. The weight that layers 1 and 3 share is of unit 1."""
    trace = Trace(micro_batches)
    trace.train()
    assert trace.events[-3:] == ["reduce 0", "norm", "update"]
    passes = " ".join(trace.events[:-3]).split("forward")[1:]
    assert len(passes) == micro_batches
    for number, text in enumerate(passes):
        happened = re.findall(r"(?:done|complete) \d|\S+", text)
        word = "complete" if number == micro_batches - 1 else "done"
        assert [event for event in happened if " " in event] == [f"{word} {unit}" for unit in (3, 2, 1, 0)]
        for name, _ in trace.module.named_parameters():
            accumulated = [place for place, event in enumerate(happened) if event == name]
            assert accumulated, name
            assert max(accumulated) < happened.index(f"{word} {name[0]}"), f"{name} in {happened}"


def test_a_step_sums_losses_and_scaled_gradients_over_micro_batches() -> None:
    trace = Trace(3)
    found = trace.train()
    whole = {key: torch.cat([batch[key] for batch in trace.batches]) for key in trace.batches[0]}
    expected = (trace.module(whole["inputs"]) * whole["targets"]).square().sum()
    grads = torch.autograd.grad(expected * 0.25, list(trace.module.parameters()))
    torch.testing.assert_close([found, *(p.grad for p in trace.module.parameters())], [expected, *grads])
    assert not found.requires_grad


@pytest.mark.parametrize("frozen", [1, 3, 4])
def test_frozen_first_layers_are_done_too_and_disturb_no_other(frozen: int) -> None:
    trace = Trace(2)
    trace.module[3].linear.weight = nn.Parameter(torch.eye(3))
    trace.module[:frozen].requires_grad_(False)
    if frozen == 4:
        trace.module[3].bias.requires_grad_(True)
    trace.train()
    units = [event for event in trace.events if event.startswith(("done", "complete"))]
    assert units == [f"{word} {unit}" for word in ("done", "complete") for unit in (3, 2, 1, 0)]


def test_evaluation_sums_losses_and_keeps_no_graph() -> None:
    trace = Trace(3)
    expected = sum((trace.module(batch["inputs"]) * batch["targets"]).square().sum().item() for batch in trace.batches)
    found = trace.executor.evaluate(forward_only(3), trace.batches, trace.context)
    assert found.item() == pytest.approx(expected)
    assert not found.requires_grad
    assert trace.events == ["forward"] * 3


class LateWeight(nn.Module):
    """A weight that reaches the product through a node of its own, which runs after the product's."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.w * 2
        return x @ scaled


def test_a_stage_whose_input_is_a_leaf_is_done_no_earlier_than_its_weights() -> None:
    """A leaf's gradient is accumulated before anything else: what a pipeline receives is one."""
    module, events = nn.Sequential(LateWeight(), LateWeight()), []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    task = PlainTask(module, lambda output, _: output.sum())
    handlers = Handlers(lambda unit, _: events.append(f"done {unit}"), lambda _: None, lambda: None, lambda: None)
    executor = Executor(task, {0: Stage(tuple(enumerate(module)))}, handlers)
    received = {"inputs": torch.ones(2, 3, requires_grad=True)}
    executor.train(accumulate(1), [received], lambda batch: batch, lambda: torch.ones(()))
    assert events == ["1.w", "done 1", "0.w", "done 0"]
    assert received["inputs"].grad is not None
