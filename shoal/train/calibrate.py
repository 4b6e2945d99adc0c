"""What this machine does in a second: matrix products, attention, bytes moved, operations started, messages, and whole
steps of small models.

On processors, what one thread does is measured by the time that it ran, which others at work do not lengthen; what
several do, and messages, by the clock, of which the shortest time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from shoal.comm.collectives import all_reduce, barrier, start_all_gather, start_exchange, start_reduce_scatter
from shoal.comm.point_to_point import connect, start_receive, start_send
from shoal.comm.world import World
from shoal.config import Config
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.trial import Trial, trial

Progress = Callable[[str, int, int], None]
"""(what is being measured, how much is done, of how much)."""

DTYPES = ("float32", "float64", "bf16")
PRODUCTS = (
    *((256, k, 512) for k in (32, 64, 128, 256, 512, 1024)),
    *((m, 256, 256) for m in (64, 1024)),
    (512, 512, 2048),
    (128, 1024, 1024),
)
"""(m, k, n) of (m, k) times (k, n)."""
ATTENTION = ((4, 4, 128, 32), (2, 4, 256, 64))
"""(samples, heads, positions, channels of a head)."""
MOVED = 1 << 22
"""Bytes that a copy reads, and as many that it writes: more than a core's own cache holds."""
MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the whole tensor."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
_ROUNDS, _LEAST, _LONG_S = 40, 6, 0.2
"""Of a message, at most and at least, and after how many seconds no more: while others are at work, few of them are not
interrupted. All ranks count the same seconds."""
_SHORT_S = 0.004
"""What one timing takes at least: short ones are repeated within it."""


class Device(NamedTuple):
    """Seconds, of one rank with so many threads."""

    products: tuple[float, ...]
    """By :data:`PRODUCTS`."""
    attention: tuple[float, ...]
    """By :data:`ATTENTION`, causal."""
    moved: float
    started: float
    """One operation on a single number."""


class Messages(NamedTuple):
    """Seconds of a collective among ``ranks`` ranks, by :data:`MESSAGES`."""

    kind: str
    ranks: int
    seconds: tuple[float, ...]


class Steps(NamedTuple):
    """A layout of a small model, and what was seen of it."""

    config: Config
    layout: Layout
    seen: Trial


class Measured(NamedTuple):
    """All of it."""

    devices: dict[tuple[str, int], Device]
    """By dtype and threads."""
    messages: tuple[Messages, ...]
    steps: tuple[Steps, ...]


def measure(cores: int, steps: Sequence[tuple[Config, Layout]], seen: Progress) -> Measured:
    """Measure processors of ``cores`` cores, by themselves and in ``steps`` of small models."""
    asked = [(dtype, threads) for threads in sorted({1, cores}) for dtype in DTYPES]
    total, done = len(asked) + 2 + len(steps), 0

    def tell(what: str) -> None:
        nonlocal done
        seen(what, done, total)
        done += 1

    devices = dict[tuple[str, int], Device]()
    for dtype, threads in asked:
        tell("devices")
        # As many at once as there are cores, since they share memory.
        with Pool(max(1, min(4, cores // threads)), threads=threads) as pool:
            seen_by = pool.run(measure_device, dtype, threads)
            found = Device(
                tuple(median(times) for times in zip(*(one.products for one in seen_by), strict=True)),
                tuple(median(times) for times in zip(*(one.attention for one in seen_by), strict=True)),
                median(one.moved for one in seen_by),
                median(one.started for one in seen_by),
            )
        # Timed by the clock, several threads seem slower than one while others are at work. They are not.
        devices[dtype, threads] = faster(found, devices.get((dtype, 1), found))
    messages = list[Messages]()
    with Pool(4) as pool:
        for ranks in (2, 4):
            tell("messages")
            first = pool.run(measure_messages, ranks=ranks)
            messages += first[0]
        tried = []
        for config, layout in steps:
            tell("steps")
            tried.append(Steps(config, layout, trial(config, layout, pool)))
    seen("steps", total, total)
    return Measured(devices, tuple(messages), tuple(tried))


def faster(one: Device, other: Device) -> Device:
    """The shorter time of each."""
    return Device(
        tuple(map(min, one.products, other.products)),
        tuple(map(min, one.attention, other.attention)),
        min(one.moved, other.moved),
        min(one.started, other.started),
    )


def measure_device(world: World, dtype: str, threads: int) -> Device:
    """This rank's device, with all others at work."""
    kind = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}[dtype]
    clock = time.thread_time if threads == 1 else time.perf_counter
    barrier(world.everyone)

    def product(m: int, k: int, n: int) -> float:
        a, b = torch.randn(m, k, dtype=kind), torch.randn(n, k, dtype=kind)
        return shortest(lambda: torch.mm(a, b.T), clock)

    def attention(samples: int, heads: int, length: int, channels: int) -> float:
        x = torch.randn(3, samples, heads, length, channels, dtype=kind)
        return shortest(lambda: scaled_dot_product_attention(x[0], x[1], x[2], is_causal=True), clock)

    source = torch.zeros(MOVED // kind.itemsize, dtype=kind)
    into, one = torch.empty_like(source), torch.zeros(1, dtype=kind)
    return Device(
        tuple(product(*shape) for shape in PRODUCTS),
        tuple(attention(*shape) for shape in ATTENTION),
        shortest(lambda: torch.add(source, 1.0, out=into), clock),
        shortest(lambda: one.add_(1.0), clock),
    )


def shortest(work: Callable[[], object], clock: Callable[[], float], rounds: int = 7) -> float:
    """Seconds of ``work``, the shortest of some rounds."""
    work()
    started = clock()
    work()
    repeats = max(1, int(_SHORT_S / max(clock() - started, 1e-7)))
    found = float("inf")
    for _ in range(rounds):
        started = clock()
        for _ in range(repeats):
            work()
        found = min(found, (clock() - started) / repeats)
    return found


def measure_messages(world: World) -> list[Messages]:
    """Collectives of all ranks, and sends from even ranks to the next: on the slowest, the shortest time."""
    group, size = world.everyone, world.size
    if world.rank % 2 == 0:
        connect(group, world.rank, world.rank + 1, world.device)
    else:
        connect(group, world.rank - 1, world.rank, world.device)

    def call(kind: str, full: torch.Tensor, other: torch.Tensor) -> None:
        part = full.chunk(size)[group.index]
        match kind:
            case "all_reduce":
                all_reduce(full, group, "calibration")
            case "all_gather":
                start_all_gather(full, part, group, "calibration").wait()
            case "reduce_scatter":
                start_reduce_scatter(part.clone(), full, group, "calibration").wait()
            case "all_to_all":
                each = full.numel() // size
                parts = [each * (place != group.index) for place in range(size)]
                kept = full[: each * (size - 1)]
                start_exchange(other[: len(kept)], parts, kept, parts, group, "calibration").wait()
            case "send" if world.rank % 2 == 0:
                start_send(full, group, world.rank + 1, 0).wait()
            case "send":
                start_receive(full, group, world.rank - 1, 0, "calibration").wait()

    found = []
    for kind in KINDS:
        times = []
        for amount in MESSAGES:
            full = torch.zeros(amount // 4)
            other, best, total = torch.empty_like(full), float("inf"), 0.0
            for round_ in range(_ROUNDS):
                if round_ >= _LEAST and total > _LONG_S:
                    break
                barrier(group)
                started = time.perf_counter()
                call(kind, full, other)
                spent = torch.tensor([time.perf_counter() - started])
                all_reduce(spent, group, "calibration", "max")
                best, total = min(best, float(spent)), total + float(spent)
            times.append(best)
        found.append(Messages(kind, size, tuple(times)))
    return found
