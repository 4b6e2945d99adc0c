from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from pipeline_ranks import breadth_first, lines_over
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.world import World
from shoal.model.task import PlainTask
from shoal.pipeline.executor import Executor, Handlers, Layer, Stage
from shoal.pipeline.lower import lower
from shoal.pipeline.schedules.forward_only import forward_only
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b


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

    def __init__(self, micro_batches: int, *, recompute: bool = False) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(2, 3), Branchy(), nn.Tanh(), Branchy())
        self.module[3].linear.weight = self.module[1].linear.weight
        self.events: list[str] = []
        for name, parameter in self.module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.events.append(name))
        self.task = PlainTask(self.module, lambda output, batch: (output * batch["targets"]).square().sum())
        layers = tuple((unit, self.layer(unit, recompute)) for unit in range(4))
        self.handlers = Handlers(
            unit_done=lambda unit, final: self.events.append(f"{'complete' if final else 'done'} {unit}"),
            reduce=lambda stage, _: self.events.append(f"reduce {stage}"),
            norm=lambda _: self.events.append("norm"),
            update=lambda _: self.events.append("update"),
            enter_unit=lambda unit, backward: self.events.append(f"{'back' if backward else 'enter'} {unit}"),
            leave_unit=lambda unit: self.events.append(f"leave {unit}"),
        )
        self.executor = Executor(self.task, [Stage(0, True, True, layers)], self.handlers, lines_over(World()))
        self.program = lower(one_f_one_b(1, micro_batches))[0]
        self.batches = [
            {"inputs": torch.randn(4, 2, dtype=torch.float32), "targets": torch.randn(4, 3)}
            for _ in range(micro_batches)
        ]

    def layer(self, unit: int, recompute: bool) -> Layer:
        def run(x: Tensor, ctx: object) -> Tensor:
            self.events.append(f"run {unit}")
            return self.task.apply_layer(self.module[unit], x, ctx)

        return partial(checkpoint, run, use_reentrant=False) if recompute else run

    def context(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self.events.append("forward")
        return batch

    def train(self) -> Tensor:
        return self.executor.run(self.program, self.batches, self.context, self.scale)

    def scale(self, micro_batch: int) -> Tensor:
        assert self.events[-1] == "back 3", "not before there is a loss to scale"
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
        happened = re.findall(r"(?:done|complete|back|enter|leave|run) \d|\S+", text)
        word = "complete" if number == micro_batches - 1 else "done"
        passes = [f"{verb} {unit}" for unit in range(4) for verb in ("enter", "run", "leave")]
        passes += [f"{verb} {unit}" for unit in (3, 2, 1, 0) for verb in ("back", word)]
        assert [event for event in happened if " " in event] == passes
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
    torch.testing.assert_close([p.grad for p in trace.module.parameters()], list(grads))
    torch.testing.assert_close(found, expected.detach().double())


@pytest.mark.parametrize("shared", [True, False])
def test_a_recomputed_unit_runs_again_between_the_start_and_the_end_of_its_backward_pass(shared: bool) -> None:
    plain, trace = Trace(2), Trace(2, recompute=True)
    if not shared:
        plain.module[3].linear.weight, trace.module[3].linear.weight = (nn.Parameter(torch.eye(3)) for _ in range(2))
    torch.testing.assert_close(trace.train(), plain.train(), rtol=0, atol=0)
    for ours, theirs in zip(trace.module.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    words = ("back", "run", "done", "complete")
    second = " ".join(trace.events).rpartition("forward")[2]
    happened = re.findall(r"(?:done|complete|back|enter|leave|run) \d|[a-z0-9.]+", second)
    units = [event for event in happened[happened.index("leave 3") :] if event.split()[0] in words and " " in event]
    # What needs no intermediate value, such as the sum at the end of a layer, does not have the layer run again.
    assert units == [f"{word} {unit}" for unit in (3, 2, 1, 0) for word in ("back", "run", "complete")]


class Same(nn.Module):
    """Gives back the very tensor that it was given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_layer_that_does_nothing_disturbs_no_other() -> None:
    trace = Trace(1)
    trace.module[2] = Same()
    trace.train()
    units = [event for event in trace.events if event.startswith(("back", "complete"))]
    last_first = [
        (3, "back"),
        (3, "complete"),
        (2, "back"),
        (2, "complete"),
        (1, "back"),
        (1, "complete"),
        (0, "back"),
        (0, "complete"),
    ]
    assert units == [f"{word} {unit}" for unit, word in last_first]


@pytest.mark.parametrize("stages", [((0, 1, 2, 3),), ((0, 1), (2, 3))])
def test_a_finished_pass_leaves_nothing_in_memory(stages: tuple[tuple[int, ...], ...]) -> None:
    trace = Trace(2)
    trace.module[3].linear.weight = nn.Parameter(torch.eye(3))
    split = [
        Stage(number, number == 0, units[-1] == 3, tuple((unit, trace.layer(unit, False)) for unit in units))
        for number, units in enumerate(stages)
    ]
    executor = Executor(trace.task, split, trace.handlers, lines_over(World()))
    program = lower(breadth_first([0] * len(stages), 2))[0]
    seen: list[weakref.ref[Tensor]] = []
    for layer in trace.module:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(weakref.ref(output)))
    gc.disable()  # what only the collector can free would stay for a while
    try:
        executor.run(program, trace.batches, trace.context, lambda _: torch.ones(()))
        assert [made() for made in seen] == [None] * 8
    finally:
        gc.enable()


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
    program = lower(forward_only((0,), 3))[0]
    found = trace.executor.run(program, trace.batches, trace.context)
    assert found.item() == pytest.approx(expected)
    assert not found.requires_grad
    assert (
        trace.events == ["forward", *(f"{word} {unit}" for unit in range(4) for word in ("enter", "run", "leave"))] * 3
    )
    outputs = trace.executor.outputs(program, trace.batches, trace.context)
    torch.testing.assert_close(outputs, [trace.module(batch["inputs"]) for batch in trace.batches])


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
    handlers = Handlers(lambda unit, _: events.append(f"done {unit}"), lambda *_: None, lambda _: None, lambda _: None)
    layers = tuple((unit, partial(task.apply_layer, layer)) for unit, layer in enumerate(module))
    executor = Executor(task, [Stage(0, True, True, layers)], handlers, lines_over(World()))
    received = {"inputs": torch.ones(2, 3, requires_grad=True)}
    executor.run(lower(one_f_one_b(1, 1))[0], [received], lambda batch: batch, lambda _: torch.ones(()))
    assert events == ["1.w", "done 1", "0.w", "done 0"]
    assert received["inputs"].grad is not None
