"""This machine, from what was measured of it: a cluster like those of the catalogue, and constants of its own.

What the benchmarks of single operations leave open — how much a layer reads and writes besides its matrices, how long
its operations take to start, what messages take in the middle of a step — is fitted to steps of small models that ran
here, each constant with a prior at what the benchmarks say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from statistics import median
from typing import Any, NamedTuple

from shoal.plan.cost import StepTimes
from shoal.plan.hardware import DEVICES, Cluster, Device
from shoal.plan.profile import PROFILES, Constants, Profile, constants
from shoal.plan.work import Job, Split

NAME = "here"
_WIDTHS = {"float32": 4, "float64": 8, "bf16": 2, "fp16": 2}
FITTED: Mapping[str, float] = {
    "rate.other": 0.15,
    "attention.flash2.other": 0.4,
    "elementwise.torch": 0.7,
    "loss.bytes": 0.7,
    "launch.eager": 0.7,
    "optimizer.passes": 0.7,
    "latency.inside": 0.7,
    "link.other": 0.5,
    "pipeline.send": 0.7,
    "context.hop": 0.7,
}
"""Constants that steps decide, and how far they may be expected from the benchmarks: the logarithm of a factor."""
_LARGE = 1 << 20
"""Bytes of a message whose time is mostly that of its bytes."""
_NOISE = 0.1
"""What a measured step may be off by, likewise."""


@dataclass(frozen=True)
class Here:
    """What the planner knows of the machine it runs on."""

    what: str
    """Its processor, and the versions of what was measured with, in words."""
    cores: int
    memory_gib: float
    devices: Mapping[str, Mapping[int, Device]]
    """By dtype, and by threads of a rank."""
    values: Mapping[str, float]
    """Constants in place of those that ship."""
    off: float
    """Median relative error on the steps that the constants were fitted to."""

    def cluster(self, ranks: int, dtype: str) -> Cluster:
        """``ranks`` ranks of it, which compute in ``dtype``."""
        of = self.devices.get(dtype) or self.devices["bf16"]
        threads = max((n for n in of if n <= max(1, self.cores // ranks)), default=1)
        device = replace(of[threads], memory_gib=self.memory_gib / ranks)
        return Cluster(f"{ranks}x{NAME}", device, 1, ranks, device.link, self.cores)

    @property
    def constants(self) -> Constants:
        """Those of the time model, here."""
        return {**constants(), **self.values}

    def as_json(self) -> dict[str, Any]:
        devices = {
            dtype: {str(threads): asdict(device) for threads, device in of.items()}
            for dtype, of in self.devices.items()
        }
        return {**asdict(self), "devices": devices}


def read(document: Any) -> Here:
    """What :meth:`Here.as_json` has made a document of. Raises ``KeyError``, ``TypeError`` or ``ValueError`` where it
    is none."""
    devices = {
        str(dtype): {int(threads): Device(**device) for threads, device in of.items()}
        for dtype, of in document["devices"].items()
    }
    return Here(**{**document, "devices": devices})


def profile(dtype: str, *, half_grads: bool = False) -> Profile:
    """Shoal on processors: nothing is hidden behind compute on the same cores, and there are no contexts."""
    width = _WIDTHS[dtype]
    gradient = 2 if half_grads else max(4, width)
    state = {8: 16, 4: 12}.get(width, 12)
    return replace(
        PROFILES["shoal"],
        gradient_bytes=gradient,
        reduce_bytes=gradient,
        state_bytes=state,
        hides_data=False,
        first_memory_gib=0.0,
    )


class Speeds(NamedTuple):
    """Benchmarks of one rank: (m, k, n, seconds) of matrix products, (samples, heads, positions, channels, seconds) of
    causal attention, seconds of reading and writing ``moved`` bytes, and of starting an operation."""

    products: Sequence[tuple[int, int, int, float]]
    attention: Sequence[tuple[int, int, int, int, float]]
    moved_bytes: float
    moved_s: float
    started_s: float


class Message(NamedTuple):
    """One collective of ``amount`` bytes altogether among ``ranks`` ranks."""

    kind: str
    ranks: int
    amount: int
    seconds: float


class Step(NamedTuple):
    """A step that ran: of which shape, length and batch, how spread, and its seconds."""

    job: Job
    split: Split
    seconds: float


def described(dtype: str, speeds: Speeds, messages: Sequence[Message], cores: int, threads: int) -> Device:
    """A device of the catalogue's kind. Where ranks share cores, a message counts what it would take with their own."""
    rate, _ = _ramp(speeds)
    link, _ = _link(messages, cores)
    # The catalogue counts 16-bit operations, of which those on wider numbers do half.
    peak = rate / 1e12 * (1.0 if _WIDTHS[dtype] == 2 else 2.0)
    return replace(
        DEVICES["cpu"],
        name=f"{NAME}-{dtype}-{threads}",
        peak=peak,
        matmul=peak,
        matmul_8bit=peak,
        memory_rate=speeds.moved_bytes / speeds.moved_s / 1e9,
        link=link / 1e9,
        nic=link / 1e9,
        host_link=speeds.moved_bytes / speeds.moved_s / 1e9,
        units=1,
        source=f"measured here, {threads} thread{'s' * (threads > 1)} a rank",
    )


def first_constants(speeds: Speeds, messages: Sequence[Message], cores: int) -> dict[str, float]:
    """Constants as the benchmarks say."""
    rate, ramp = _ramp(speeds)
    shares = []
    for samples, heads, positions, channels, seconds in speeds.attention:
        flops = 2.0 * samples * positions * positions * 2 * heads * channels
        shares.append(0.5 * flops / (rate * seconds))
    _, latency = _link(messages, cores)
    return {
        "matmul.ramp": ramp,
        "matmul.tiles": 0.0,
        "rate.other": 1.0,
        "memory.efficiency": 1.0,
        "launch.eager": speeds.started_s * 1e6,
        "attention.flash2.other": median(shares),
        "attention.head": 0.01,
        "elementwise.torch": 1.5,
        "loss.bytes": 20.0,
        "optimizer.passes": 1.5,
        "latency.inside": latency * 1e6,
        "link.other": 1.0,
        "link.ramp": 0.001,
        "pipeline.send": 1.0,
        "context.hop": latency * 1e6,
        "overlap.slowdown": 1.0,
        "jitter": 0.0,
    }


def _ramp(speeds: Speeds) -> tuple[float, float]:
    """(operations a second, ramp) of 2·m·n·(k + ramp) / rate, fitted to relative errors."""
    a = b = c = d = e = 0.0
    for m, k, n, seconds in speeds.products:
        x, y = 2.0 * m * n * k / seconds, 2.0 * m * n / seconds
        a, b, c, d, e = a + x * x, b + x * y, c + y * y, d + x, e + y
    slope, edge = (d * c - e * b) / (a * c - b * b), (e * a - d * b) / (a * c - b * b)
    if slope <= 0 or edge <= 0:
        slope, edge = d / a, d / a
    return 1.0 / slope, max(1.0, edge / slope)


def _link(messages: Sequence[Message], cores: int) -> tuple[float, float]:
    """(bytes a second, latency) of a rank in a ring: of large gathers, and of the smallest."""
    rates, latencies = [], []
    gathers = [one for one in messages if one.kind in ("all_gather", "reduce_scatter")]
    for ranks in {one.ranks for one in gathers}:
        mine = [one for one in gathers if one.ranks == ranks]
        alone = min(1.0, cores / ranks)
        for kind in ("all_gather", "reduce_scatter"):
            times = sorted((one.amount, one.seconds * alone) for one in mine if one.kind == kind)
            (least, start), larger = times[0], [one for one in times if one[0] >= _LARGE] or times[-1:]
            # The best of the large ones: the longer one takes, the surer it is to be interrupted.
            rates.append(max((amount - least) * (ranks - 1) / ranks / (s - start) for amount, s in larger if s > start))
            latencies.append(start)
    return median(rates), median(latencies)


def fitted(steps: Sequence[Step], start: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """The constants that :data:`FITTED` names, fitted to ``steps`` by damped Gauss–Newton on logarithms, and the
    median relative error that is left. The others stay as they ``start``."""
    names = tuple(FITTED)
    # What a constant may be off by weighs as much as what a step may.
    spreads = [FITTED[name] / _NOISE for name in names]

    def errors(moves: Sequence[float]) -> list[float]:
        values = {**constants(), **start, **{n: start[n] * exp(x) for n, x in zip(names, moves, strict=True)}}
        return [log(StepTimes(one.job, values).estimate(one.split).step_s / one.seconds) for one in steps]

    moves = [0.0] * len(names)
    now = errors(moves)
    for _ in range(12):
        slopes = []
        for at in range(len(names)):
            changed = [x + 0.02 * (place == at) for place, x in enumerate(moves)]
            slopes.append([(b - a) / 0.02 for a, b in zip(now, errors(changed), strict=True)])
        # A few odd steps must not bend the rest.
        weights = [1.0 / max(1.0, abs(error) / _NOISE) for error in now]
        matrix = [
            [
                sum(w * x * y for w, x, y in zip(weights, a, b, strict=True)) + (i == j) * (0.05 + 1 / spreads[i] ** 2)
                for j, b in enumerate(slopes)
            ]
            for i, a in enumerate(slopes)
        ]
        right = [
            -sum(w * x * y for w, x, y in zip(weights, a, now, strict=True)) - moves[i] / spreads[i] ** 2
            for i, a in enumerate(slopes)
        ]
        moves = [x + max(-0.5, min(0.5, d)) for x, d in zip(moves, _solved(matrix, right), strict=True)]
        now = errors(moves)
    values = {**start, **{n: start[n] * exp(x) for n, x in zip(names, moves, strict=True)}}
    return values, median(abs(exp(error) - 1.0) for error in now)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Of a symmetric positive system, by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for at in range(size):
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            rows[below] = [x - factor * y for x, y in zip(rows[below], rows[at], strict=True)]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(rows[at][k] * found[k] for k in range(at + 1, size))
        found[at] = (rows[at][size] - rest) / rows[at][at]
    return found
