"""Seconds by what they are spent on."""

from __future__ import annotations

from typing import NamedTuple


class Terms(NamedTuple):
    """The parts of a pass. Communication counts as far as compute does not hide it."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    gather: float = 0.0
    """Of parameters that ZeRO-3 divides."""

    def __add__(self, other: tuple[float, ...]) -> Terms:  # type: ignore[override]
        return Terms(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Terms:
        return Terms(*(a * factor for a in self))

    @property
    def total(self) -> float:
        return sum(self)


class Passes(NamedTuple):
    """What a layer, or a stage, takes in its three passes: recomputation is part of the input-gradient pass."""

    forward: Terms
    input_gradient: Terms
    weight_gradient: Terms

    def plus(self, other: Passes) -> Passes:
        return Passes(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def total(self) -> Terms:
        return self.forward + self.input_gradient + self.weight_gradient
