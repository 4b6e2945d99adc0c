"""What the layers of a model cost, one by one, and what the stages that they are cut into then cost.

Neighbours in a stage hold some tensors together, which count once there: what one of them has made and the other takes
in, and the context of the micro-batch. So what a stage holds is less than the sum of its layers. (What a layer hands on
as it is, such as a view of its input, counts twice where the layers on both its sides hold it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from shoal.pipeline.simulate import Costs


@dataclass(frozen=True)
class LayerCosts:
    """What a micro-batch costs in each layer of a model: seconds and bytes, by layer. The last layer's include those of
    the loss.

    All but the first six may be left out: they count as nothing then, and the peaks as not known.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    held: tuple[int, ...]
    """What a forward pass leaves for the backward pass; the layer's input is part of it, where that needs it."""
    kept: tuple[int, ...]
    """What an input-gradient pass leaves for the weight-gradient pass: factors of the weights' gradients."""
    output: tuple[int, ...]
    parameters: tuple[int, ...] = ()
    """Those of the layer that train; one of several layers counts in each."""
    context: tuple[int, ...] = ()
    """Of the micro-batch's context, what the forward pass leaves for the backward pass, beside ``held``."""
    own_output: tuple[int, ...] = ()
    """Of the output, what is in ``held``."""
    common: tuple[int, ...] = ()
    """Of the output, what is both in ``held`` and in that of the layer after."""
    common_kept: tuple[int, ...] = ()
    """Of the output, what is both in ``held`` and in ``kept`` of the layer after."""
    kept_gradient: tuple[int, ...] = ()
    """Of the gradient of the output, what is in ``kept``."""
    forward_peak: tuple[int, ...] = ()
    """The most within a forward pass, the input and the output included."""
    backward_peak: tuple[int, ...] = ()
    """The most within a backward pass beyond what there is when it begins, the gradient of the output included."""
    input_gradient_peak: tuple[int, ...] = ()
    """Likewise within an input-gradient pass."""

    def __len__(self) -> int:
        return len(self.forward)

    def of(self, name: str, layer: int) -> int:
        """One of the amounts of a layer, which may not be known."""
        amounts: tuple[int, ...] = getattr(self, name)
        return amounts[layer] if amounts else 0


def by_stage(costs: LayerCosts, stages: Sequence[range], transfer: float = 0.0) -> Costs:
    """What the passes of a micro-batch cost in each of the ``stages``, in seconds and bytes; ``transfer`` is how many
    seconds a tensor takes from one to the next."""
    found = {layers: _Stage(costs, layers) for layers in set(stages)}
    each = [found[layers] for layers in stages]
    known = bool(costs.forward_peak)
    return Costs(
        forward=_sums(costs.forward, stages),
        input_gradient=_sums(costs.input_gradient, stages),
        weight_gradient=_sums(costs.weight_gradient, stages),
        held=tuple(one.held[-1] for one in each),
        kept=_sums(costs.kept, stages),
        transfer=transfer,
        boundary=tuple(costs.output[layers[-1]] for layers in stages),
        shared=tuple(costs.of("own_output", layers[-1]) for layers in stages),
        forward_peak=tuple(one.forward_peak for one in each) if known else (),
        backward_peak=tuple(one.backward_peak for one in each) if known else (),
        input_gradient_peak=tuple(one.input_gradient_peak for one in each) if known else (),
    )


def _sums(amounts: Sequence[float], stages: Sequence[range]) -> tuple[float, ...]:
    return tuple(sum(amounts[layers.start : layers.stop]) for layers in stages)


class _Stage:
    """The memory of consecutive layers."""

    def __init__(self, costs: LayerCosts, layers: range) -> None:
        self._costs, self._layers = costs, layers
        of = costs.of
        twice = [0, *(of("common", layer) for layer in layers[:-1])]
        self._own = list(accumulate(costs.held[layer] - common for layer, common in zip(layers, twice, strict=True)))
        context = accumulate((of("context", layer) for layer in layers), max)
        self.held = [own + shared for own, shared in zip(self._own, context, strict=True)]
        """Once a forward pass has gone through so many of the layers."""

    @cached_property
    def forward_peak(self) -> int:
        """A layer begins with what those before hold; its input may be part of that."""
        of, layers = self._costs.of, self._layers
        before = [0, *self._own[:-1]]
        inputs = [0, *(of("own_output", layer) for layer in layers[:-1])]
        peaks = [
            held - part + of("forward_peak", layer) for held, part, layer in zip(before, inputs, layers, strict=True)
        ]
        return max(peaks) + max(of("context", layer) for layer in layers)

    @cached_property
    def backward_peak(self) -> int:
        return self._peak("backward_peak", [0] * len(self._layers))

    @cached_property
    def input_gradient_peak(self) -> int:
        of, layers = self._costs.of, self._layers
        kept = [self._costs.kept[layer] for layer in layers]
        kept[-1] -= of("kept_gradient", layers[-1])
        after = [*list(accumulate(reversed(kept)))[-2::-1], 0]
        common = [*(of("common_kept", layer) for layer in layers[:-1]), 0]
        return self._peak("input_gradient_peak", [amount - held for amount, held in zip(after, common, strict=True)])

    def _peak(self, name: str, kept: Sequence[int]) -> int:
        """``kept`` is what the layers after each have kept, beside what it holds itself. The gradient of the stage's
        output, which counts already, is there until the pass ends."""
        peaks = [
            held - self.held[-1] + after + self._costs.of(name, layer)
            for held, after, layer in zip(self.held, kept, self._layers, strict=True)
        ]
        peaks[-1] -= self._costs.output[self._layers[-1]]
        return max(peaks)
