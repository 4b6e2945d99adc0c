"""What each layer of a model costs, measured in one process by running it as the engine would.

Layers run one at a time, each on what the one before has made, as the first of a stage does: what it holds is then its
own. Bytes are what the meter sees, so a storage counts once, whoever refers to it and however. Times are measured apart
from them, since the meter slows everything down.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.errors import ConfigError
from shoal.meter import Meter
from shoal.model import own_grad
from shoal.model.context import Batch
from shoal.model.linear import attach_sink
from shoal.model.own_grad import Contribution, Deferred
from shoal.model.task import Task, check_module
from shoal.pipeline.arrival import arrive
from shoal.pipeline.layer_costs import LayerCosts, by_stage

__all__ = ["LayerCosts", "by_stage", "measure"]

T = TypeVar("T")
Layer = Callable[[Any, Any], Any]
"""A layer as a function of its input and the micro-batch's context. Between layers may be tensors in containers."""


def measure(
    task: Task,
    batch: Batch,
    *,
    repeats: int = 5,
    runs: Sequence[Layer] | None = None,
    seen: Callable[[int, int], None] = lambda done, of: None,
) -> LayerCosts:
    """The costs of each of the task's layers for the micro-batch ``batch``; times are medians of ``repeats``.

    The parameters have values (:func:`shoal.local.materialise`), and no engine has them; what gradients they have is
    lost. ``runs`` are the layers as functions of their input and the context, where they run otherwise than by
    ``task.apply_layer``: recomputed, for one (:func:`shoal.build.run_of`). ``seen`` is told how many of all rounds
    through the layers are done.

    Raises :class:`ConfigError` for parameters without values, or of an engine.
    """
    check_module(task.module)
    for name, parameter in task.module.named_parameters():
        if parameter.is_meta:
            raise ConfigError(f"measure: {name} has no values; give it some first, by shoal.local.materialise for one")
    with _as_it_was(task.module) as deferred, torch.enable_grad():
        layers = _Layers(task, batch, deferred, runs)
        rounds = repeats + 2  # the first gets things warm, the last counts bytes
        times = []
        for done in range(1, rounds):
            times.append(layers.in_turn(layers.seconds))
            seen(done, rounds)
        with Meter() as meter:
            found = layers.in_turn(partial(layers.bytes, meter))
        seen(rounds, rounds)
    after = [*found[1:], _Bytes({}, [], [], [])]
    forward, input_gradient, weight_gradient = (
        tuple(median(each) for each in zip(*([layer[kind] for layer in one] for one in times[1:]), strict=True))
        for kind in range(3)
    )
    return LayerCosts(
        forward,
        input_gradient,
        weight_gradient,
        parameters=tuple(_trained(layer) for _, layer in task.layers()),
        common=tuple(sum(map(min, one.outputs, other.inputs)) for one, other in zip(found, after, strict=True)),
        common_kept=tuple(
            sum(map(min, one.outputs, other.kept_inputs)) for one, other in zip(found, after, strict=True)
        ),
        own_output=tuple(sum(one.outputs) for one in found),
        **{name: tuple(one.amounts[name] for one in found) for name in found[0].amounts},
    )


def _trained(layer: nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in layer.parameters() if one.requires_grad)


class _Alone:
    """The gradient of a weight that no other rank has: as the engine keeps it."""

    def __init__(self, parameter: nn.Parameter, deferred: Deferred) -> None:
        self._parameter, self.later = parameter, deferred.keep

    def add_arriving(self, arrive: Callable[[], Tensor]) -> None:
        self.add(arrive())

    def add(self, gradient: Tensor) -> None:
        own_grad.add(self._parameter, gradient)

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        own_grad.add_scaled(self._parameter, gradient, scale)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        product = partial(own_grad.add_product, self._parameter, left, right)
        if not self.later(product):
            product()


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[Deferred]:
    """Weights' gradients of ``module`` can wait, until it, and PyTorch's generators, are as they were."""
    deferred = Deferred()
    weights = [one for one in module.parameters() if one.requires_grad and one.ndim == 2]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    for weight in weights:
        attach_sink(weight, _Alone(weight, deferred))
    try:
        with torch.random.fork_rng():
            yield deferred
    finally:
        for weight in weights:
            del weight.sink  # type: ignore[attr-defined]
        for parameter in module.parameters():
            parameter.grad = None
        for buffer, values in buffers:
            buffer.copy_(values)


class _Memory:
    """The storage of a tensor, which may go."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage, self.nbytes = weakref.ref(storage), storage.nbytes()

    @property
    def left(self) -> int:
        """The bytes that are still there."""
        return 0 if self._storage() is None else self.nbytes


class _Start(torch.autograd.Function):
    """Where a backward pass starts that makes the gradients of the output within itself, as that of a later layer does,
    and drops them when they have served."""

    @staticmethod
    def forward(ctx: Any, made: list[_Memory], *output: Tensor) -> Tensor:
        ctx.made, ctx.like = made, [(one.shape, one.dtype, one.device) for one in output]
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        ctx.made += map(_Memory, gradients)
        return None, *gradients


@dataclass
class _Graph:
    """What a forward pass has left, and in ``gradients`` those of the input once a backward pass has been there."""

    inputs: list[_Memory]
    outputs: list[_Memory]
    made: list[_Memory]
    gradients: list[Tensor]
    edge: GradientEdge | None = None

    def backward(self) -> None:
        if self.edge is not None:
            torch.autograd.backward(self.edge, torch.empty(0))


class _Bytes(NamedTuple):
    """By the names of :class:`LayerCosts`; and of each tensor of the input and the output what is held, or kept."""

    amounts: dict[str, int]
    inputs: list[int]
    kept_inputs: list[int]
    outputs: list[int]


class _Layers:
    """The layers of a task, on one micro-batch."""

    def __init__(self, task: Task, batch: Batch, deferred: Deferred, runs: Sequence[Layer] | None) -> None:
        self._task, self._batch, self._deferred = task, batch, deferred
        runs = runs or [partial(task.apply_layer, layer) for _, layer in task.layers()]
        self._runs: list[Layer] = [*runs[:-1], lambda x, ctx: task.loss(runs[-1](x, ctx), ctx)]
        self._device = next(iter(batch.values())).device
        self._phases = count()

    def in_turn(self, look: Callable[[int, Any], tuple[T, Any]]) -> list[T]:
        """What ``look(layer, input)`` finds at each; it returns the layer's output, too."""
        found, x = [], None
        for number in range(len(self._runs)):
            one, x = look(number, x)
            found.append(one)
        return found

    def seconds(self, number: int, given: Any) -> tuple[tuple[float, float, float], Any]:
        """Of a forward, an input-gradient and a weight-gradient pass."""
        ctx, waiting = self._context(), list[Contribution]()
        x = self._input(number, given, [])
        begin = self._now()
        y = self._runs[number](x, ctx)
        forward = self._now() - begin
        ends = [one for one in _tensors(y) if one.requires_grad]
        gradients = [torch.ones_like(one) for one in ends]
        self._deferred.kept = waiting
        begin = self._now()
        if ends:
            torch.autograd.backward(ends, gradients)
        input_gradient = self._now() - begin
        self._deferred.kept = None
        weight_gradient = 0.0
        if waiting:
            begin = self._now()
            _make(waiting)
            weight_gradient = self._now() - begin
        return (forward, input_gradient, weight_gradient), _detached(y)

    def bytes(self, meter: Meter, number: int, given: Any) -> tuple[_Bytes, Any]:
        """What the meter sees when a layer runs for the second time: it knows parameters and gradients by then."""
        self._bytes(meter, number, given)
        found = self._bytes(meter, number, given)
        return found, _detached(self._runs[number](self._input(number, given, []), self._context()))

    def _bytes(self, meter: Meter, number: int, given: Any) -> _Bytes:
        peaks: dict[str, int] = {}

        @contextmanager
        def peak(name: str) -> Iterator[None]:
            before, phase = meter.live(), f"{name} {next(self._phases)}"
            with meter.phase(phase):
                yield
            peaks[name] = meter.peak(phase) - before

        start = meter.live()
        ctx = self._context()
        with_context = meter.live()
        with peak("forward_peak"):
            graph = self._forward(number, given, ctx)
        held = meter.live() - with_context
        del ctx
        context = meter.live() - start - held
        inputs, outputs = [one.left for one in graph.inputs], [one.left for one in graph.outputs]
        with peak("backward_peak"):
            graph.backward()
        del graph

        graph, waiting = self._forward(number, given, self._context()), list[Contribution]()
        self._deferred.kept = waiting
        with peak("input_gradient_peak"):
            graph.backward()
        self._deferred.kept = None
        graph.gradients.clear()  # what waits may refer to the graph, and that to them; they go to the stage before
        given_in, made, output = graph.inputs, graph.made, sum(one.nbytes for one in graph.outputs)
        del graph
        kept, kept_gradient = meter.live() - start, sum(one.left for one in made)
        kept_inputs = [one.left for one in given_in]
        _make(waiting)
        amounts = {"held": held, "kept": kept, "output": output, "context": context, "kept_gradient": kept_gradient}
        return _Bytes(amounts | peaks, inputs, kept_inputs, outputs)

    def _forward(self, number: int, given: Any, ctx: Any) -> _Graph:
        """Nothing is left of it but the graph."""
        graph = _Graph([], [], [], [])
        x = self._input(number, given, graph.gradients)
        y = self._runs[number](x, ctx)
        graph.inputs += map(_Memory, _tensors(x))
        graph.outputs += map(_Memory, _tensors(y))
        if ends := [one for one in _tensors(y) if one.requires_grad]:
            graph.edge = get_gradient_edge(_Start.apply(graph.made, *ends))  # type: ignore[no-untyped-call]
        return graph

    def _context(self) -> Any:
        return self._task.context(self._batch, train=True)

    def _input(self, number: int, given: Any, gradients: list[Tensor]) -> Any:
        """What a layer takes in: of the first, the micro-batch; else what came from the layer before, as if from
        another stage."""
        if number == 0:
            x = self._task.enter(self._batch)
            return x.view_as(x) if x.is_leaf and x.requires_grad else x

        def come(one: Tensor) -> Tensor:
            x = one.detach().clone()
            return arrive(x, gradients.append) if one.requires_grad else x

        return tree_map_only(Tensor, come, given)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _make(waiting: list[Contribution]) -> None:
    with torch.no_grad():
        while waiting:
            waiting.pop(0)()


def _tensors(value: object) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


def _detached(value: Any) -> Any:
    """Of each tensor its values, and whether it needs a gradient."""
    return tree_map_only(Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), value)
