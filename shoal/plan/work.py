"""One way to spread one job: what the models of time and memory are asked about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shoal.plan.hardware import Cluster
from shoal.plan.profile import Profile
from shoal.plan.shape import Layer, Shape


class Split(NamedTuple):
    """A layout by its numbers alone, light enough to make many of. Ranks count with tp fastest, then cp, dp, pp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 0
    shard: int = 0
    """Ranks that ZeRO divides over; 0 for all of dp·cp."""
    sequence: bool = False
    """Whether tensor parallelism divides activations between its matrices along the sequence."""
    schedule: str = "1f1b"
    chunks: int = 1
    samples: int = 1
    """Of a micro-batch."""
    micro_batches: int = 1
    """Of a step."""
    recompute: str = "none"
    recomputing: int = -1
    """Of the pipeline's ranks, how many from the first recompute; −1 for all."""
    offload: float = 0.0
    """The share of optimizer states that the host keeps."""
    cp_kind: str = "ring"
    layers: tuple[int, ...] = ()
    """Of each global stage; () for as even as they are."""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def sharded(self) -> int:
        """Ranks that ZeRO divides over."""
        return self.shard or self.dp * self.cp


@dataclass(frozen=True)
class Job:
    """What is to be trained on what: the same for all splits that are compared."""

    shape: Shape
    cluster: Cluster
    seq: int
    batch: int
    """Samples of a step."""
    profile: Profile
    precision: str = "bf16"
    """bf16, fp16, fp8 (matrix products of layers alone; mxfp8 and nvfp4 likewise) or float32."""

    @cached_property
    def width(self) -> int:
        """Bytes of an activation."""
        return {"float32": 4, "float64": 8}.get(self.precision, 2)

    @cached_property
    def bits(self) -> int:
        """Of what matrix products of layers take in."""
        return {"fp8": 8, "mxfp8": 8, "nvfp4": 4}.get(self.precision, 16)

    @property
    def eight_bit(self) -> bool:
        """Whether their inputs are rounded first."""
        return self.bits < 16


class Cut(NamedTuple):
    """What one stage has: so many layers of each kind, and the embedding or the head."""

    kinds: tuple[tuple[Layer, int], ...]
    first: bool
    last: bool


class Cuts:
    """The stages of a shape under splits, worked out once for each way to cut."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Cut, ...]] = {}

    def of(self, split: Split) -> tuple[Cut, ...]:
        """By global stage."""
        key = split.pp * split.chunks, split.layers
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._cut(*key)
        return known

    def _cut(self, stages: int, layers: tuple[int, ...]) -> tuple[Cut, ...]:
        counts = layers or even_layers(self._shape.layers, stages)
        each, at = self._shape.each, 0
        found = []
        for number, count in enumerate(counts):
            kinds: dict[int, tuple[Layer, int]] = {}
            for layer in each[at : at + count]:
                kinds[id(layer)] = layer, kinds.get(id(layer), (layer, 0))[1] + 1
            found.append(Cut(tuple(kinds.values()), number == 0, number == stages - 1))
            at += count
        return tuple(found)


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """How many layers each stage has: evenly where they divide, as most systems cut; else so that the largest stage is
    the smallest, with the embedding and the head counted as a layer each."""
    if layers % stages == 0:
        return (layers // stages,) * stages
    most = max(-(-(layers + 2) // stages), 2)
    counts = [most] * stages
    counts[0] -= 1
    counts[-1] -= 1
    extra = sum(counts) - layers
    # What is too much goes from stages that are spread evenly, so that no rank has to give up all of it.
    full = [stage for stage in range(stages) if counts[stage] == most] or list(range(stages))
    while extra > 0:
        taken = full[:: max(1, len(full) // min(extra, len(full)))][:extra]
        for stage in taken:
            if counts[stage] > 0:
                counts[stage] -= 1
                extra -= 1
    return tuple(counts)
