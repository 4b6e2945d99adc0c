"""One way to spread one job: what the models of time and memory are asked about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shoal.plan.hardware import Cluster
from shoal.plan.profile import Profile
from shoal.plan.shape import Shape


class Split(NamedTuple):
    """A layout by its numbers alone, light enough to make a million of. Ranks count with tp fastest, then cp, dp, pp."""

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
    count: int = 1
    """Micro-batches of a step."""
    recompute: str = "none"
    recomputing: int = -1
    """Of the pipeline's ranks, how many from the first recompute; −1 for all."""
    offload: float = 0.0
    """The share of optimizer states that the host keeps."""
    cp_kind: str = "ring"

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


def layers_of_stages(shape: Shape, stages: int, weights: tuple[float, float] | None = None) -> tuple[range, ...]:
    """Which layers each stage has, the embedding with the first and the head with the last.

    Evenly where the layers divide, as most systems cut; else so that the largest stage is the smallest, the embedding
    and the head counting as ``weights`` layers (one each if not given).
    """
    total = shape.layers
    if total % stages == 0 and weights is None:
        size = total // stages
        return tuple(range(at, at + size) for at in range(0, total, size))
    first, last = weights or (1.0, 1.0)
    least = -(-total // stages)
    most = max(total / stages, (total + first + last) / stages)
    for limit in range(int(most), total + 2):
        room = [limit] * stages
        room[0] -= round(first)
        room[-1] -= round(last)
        if sum(max(1, r) for r in room) >= total:
            break
    counts = [max(1, r) for r in room]
    # What is too much goes from the stages in the middle on, one layer each.
    extra, at = sum(counts) - total, stages // 2
    while extra > 0:
        if counts[at % stages] > max(1, least - 1) or extra > stages:
            counts[at % stages] -= 1
            extra -= 1
        at += 1
        if at > 4 * stages:
            least -= 1
            at = 0
    stops = [sum(counts[: n + 1]) for n in range(stages)]
    return tuple(range(stop - size, stop) for stop, size in zip(stops, counts, strict=True))
