"""``python -m bench.sleep``: what a pipeline's runtime itself costs, beside torch.distributed.pipelining.

Stages sleep instead of computing (:mod:`bench.nap`), while their activations are sent for real. What a step takes more
than the longest path through its passes is the runtime: Python, autograd, messages, and waiting in the wrong order. A
step whose stages do nothing at all is runtime alone. Both engines take their steps in turn, in the same processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from bench.nap import Naps, NapStage, mean
from bench.pairs import in_turn
from bench.realtime import permitted, scheduling, words_for
from bench.sleep_peer import peer
from shoal.comm.collectives import all_reduce, broadcast
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.model.task import PlainTask
from shoal.pipeline.executor import Contribution, Executor, Handlers, Stage
from shoal.pipeline.lines import Lines
from shoal.pipeline.lower import lower
from shoal.pipeline.program import Programs, placement
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulate import even, simulate
from shoal.pipeline.trace import Recorder
from shoal.train.pool import Pool

WARM = 3
"""Steps of each engine before any is timed."""
LEAD_S = 0.02
"""From agreeing on when a step starts to its start."""
TIMEOUT_S = 60.0
SHOAL, PEER = "Shoal", "torch"


@dataclass(frozen=True)
class Case:
    """A schedule, by its name here and there, with ``chunks`` stages a rank."""

    name: str
    peer: str
    chunks: int = 1
    most: float = 0.7
    """Of the peer's overhead: what Shoal's may be."""

    @property
    def most_empty(self) -> float:
        """Of the peer's empty step, what Shoal's may take."""
        return 0.75 if self.chunks == 1 else 0.6


CASES = (
    Case("gpipe", "GPipe", most=0.85),
    Case("1f1b", "1F1B", most=0.85),
    Case("interleaved", "Interleaved1F1B", 2),
    Case("breadth-first", "LoopedBFS", 2),
    Case("zb-h1", "InterleavedZeroBubble"),
    Case("zb-v", "ZBVZeroBubble", 2),
    Case("dualpipe-v", "DualPipeV", 2),
)


@dataclass(frozen=True)
class Size:
    """How many micro-batches, seconds that a rank sleeps for each, and KiB of an activation, float32."""

    naps: Naps
    kib: int
    micro_batches: int = 8


FULL = Size(Naps(0.020, 0.020, 0.020), kib=1024)
EMPTY = Size(Naps(0, 0, 0), kib=4)
"""Activations are small too: it is no measure of copying."""


@dataclass(frozen=True)
class Seen:
    """What one rank saw, by engine: seconds from the common start of each step to its end here."""

    seconds: dict[str, list[float]]
    peer_passes: Programs | None


@dataclass(frozen=True)
class Row:
    """One line of the table. Times are medians in milliseconds; an overhead is measured/ideal − 1."""

    schedule: str
    peer: str
    ideal_ms: float
    shoal_ms: float
    peer_ms: float
    shoal_overhead: float
    peer_overhead: float
    shoal_empty_ms: float
    peer_empty_ms: float
    most: float
    most_empty: float
    load: float

    @property
    def ratio(self) -> float:
        return self.shoal_overhead / self.peer_overhead

    @property
    def ratio_empty(self) -> float:
        return self.shoal_empty_ms / self.peer_empty_ms


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for. Under real-time scheduling 1 when a target is missed; else there is no verdict."""
    options = _options(arguments)
    cases = [case for case in CASES if not options.only or case.name in options.only]
    realtime = options.rt and permitted()
    rows = []
    try:
        with Pool(options.ranks, threads=1) as pool:
            watched = Console(stderr=True)
            for case in track(cases, "measuring", console=watched, disable=not watched.is_terminal):
                rows.append(_row(case, pool, options.pairs, realtime))
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    how = words_for(realtime, options.rt)
    if options.json:
        print(json.dumps({"scheduling": how, "rows": [asdict(row) for row in rows]}))
    else:
        shown = Console()
        if not shown.is_terminal:
            shown.width = 132
        shown.print(_table(rows, how, realtime))
    return int(realtime and not all(row.ratio <= row.most and row.ratio_empty <= row.most_empty for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sleep",
        description="What a pipeline step costs beyond its passes, beside torch.distributed.pipelining.",
        epilog="example: python -m bench.sleep --only 1f1b zb-v --rt",
    )
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--ranks", type=int, default=4, metavar="P", help="pipeline ranks (default: 4)")
    parser.add_argument("--pairs", type=int, default=9, metavar="N", help="steps of each engine (default: 9)")
    parser.add_argument("--rt", action="store_true", help="real-time scheduling where it is permitted")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args(arguments)


def measure(world: World, case: Case, size: Size, pairs: int, realtime: bool) -> Seen:
    """Take the steps of both engines in turn, on this rank, each from one moment that all ranks agree on."""
    world.default_group()  # the peer's
    passes = SCHEDULES[case.name](world.size, size.micro_batches, case.chunks)
    x = torch.rand(size.micro_batches, size.kib, 256, generator=torch.Generator().manual_seed(0))
    held = [stage for stage, home in enumerate(placement(passes)) if home == world.rank]
    ours, theirs = ({stage: NapStage(size.naps.divided(case.chunks), stage) for stage in held} for _ in range(2))
    step, peer_passes = peer(case.peer, theirs, world.size, x)
    steps = {SHOAL: (shoal(world, passes, ours, x), ours), PEER: (step, theirs)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}

    def take(name: str) -> float:
        step, modules = steps[name]
        for module in modules.values():
            module.zero_grad(set_to_none=True)
        start = _agreed_start(world)
        _sleep_until(start)
        loss = step()
        seconds[name].append(time.monotonic() - start)
        return loss

    losses = [{name: take(name) for name in steps} for _ in range(WARM)]
    for found in losses:
        torch.testing.assert_close(found[SHOAL], found[PEER])
    for stage in held:
        torch.testing.assert_close(_gradients(ours[stage]), _gradients(theirs[stage]))
    gc.collect()
    with scheduling(realtime, ahead=0):
        for pair in range(pairs):
            for name in in_turn(list(steps), pair):
                take(name)
    return Seen({name: found[WARM:] for name, found in seconds.items()}, peer_passes)


def shoal(
    world: World, passes: Programs, modules: dict[int, NapStage], x: Tensor, recorder: Recorder | None = None
) -> Callable[[], float]:
    """A step of Shoal's executor on ``x`` [micro-batches, ...], which returns the summed loss, zero where the last
    stage is elsewhere. There is nothing to reduce and nothing to update."""
    task = PlainTask(torch.nn.Sequential(*modules.values()), mean)

    def postpone(waiting: list[Contribution] | None) -> None:
        for module in modules.values():
            module.waiting = waiting

    ranks, last = tuple(range(world.size)), len(placement(passes)) - 1
    stages = [
        Stage(number, number == 0, number == last, ((number, partial(task.apply_layer, module)),))
        for number, module in modules.items()
    ]
    handlers = Handlers(_nothing, _nothing, _nothing, _nothing, postpone=postpone)
    lines = Lines.over(lambda channel: world.group(ranks, "world", channel))
    executor = Executor(task, stages, handlers, lines, recorder)
    program = lower(passes)[world.rank]
    batches = [{"inputs": part} for part in x.split(1)]
    one = torch.ones(())

    def step() -> float:
        return executor.run(program, batches, lambda batch: batch, lambda _: one).item()

    return step


def _nothing(*_: object) -> None:
    pass


def _gradients(module: NapStage) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def _agreed_start(world: World) -> float:
    """A moment soon, when all ranks are ready; by a clock that all processes of a machine share."""
    all_reduce(torch.zeros(1), world.everyone, "start")
    start = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
    broadcast(start, world.everyone, "start")
    return start.item()


def _sleep_until(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def _row(case: Case, pool: Pool, pairs: int, realtime: bool) -> Row:
    run = partial(pool.run, timeout_s=TIMEOUT_S)
    seen: list[Seen] = run(measure, case, FULL, pairs, realtime)
    of_empty: list[Seen] = run(measure, case, EMPTY, 2 * pairs, realtime)
    ours = SCHEDULES[case.name](pool.size, FULL.micro_batches, case.chunks)
    ideals = {SHOAL: _ideal(ours, case), PEER: _ideal(seen[0].peer_passes or ours, case)}
    took = {name: _median(seen, name) for name in ideals}
    return Row(
        schedule=case.name,
        peer=case.peer,
        ideal_ms=1e3 * ideals[SHOAL],
        shoal_ms=1e3 * took[SHOAL],
        peer_ms=1e3 * took[PEER],
        shoal_overhead=took[SHOAL] / ideals[SHOAL] - 1,
        peer_overhead=took[PEER] / ideals[PEER] - 1,
        shoal_empty_ms=1e3 * _median(of_empty, SHOAL),
        peer_empty_ms=1e3 * _median(of_empty, PEER),
        most=case.most,
        most_empty=case.most_empty,
        load=os.getloadavg()[0],
    )


def _median(seen: Sequence[Seen], name: str) -> float:
    """Of the steps, each as long as on the rank that ends it last."""
    return median(max(ranks) for ranks in zip(*(one.seconds[name] for one in seen), strict=True))


def _ideal(passes: Programs, case: Case) -> float:
    """The longest path through the passes."""
    naps = FULL.naps
    costs = even(
        len(passes),
        case.chunks,
        forward=naps.forward,
        input_gradient=naps.input_gradient,
        weight_gradient=naps.weight_gradient,
    )
    return simulate(passes, costs).makespan


def _table(rows: Sequence[Row], how: str, verdict: bool) -> Table:
    table = Table(
        title="What the runtime adds to a pipeline step",
        caption="overhead: measured/ideal − 1, of medians; empty: a step whose stages do nothing; ratios are Shoal's "
        f"over the peer's\nscheduling: {how}" + ("" if verdict else "; without SCHED_FIFO there is no verdict"),
    )
    table.add_column("schedule")
    table.add_column("peer")
    for name in (
        "ideal ms",
        "overhead",
        "peer's",
        "ratio",
        "at most",
        "empty ms",
        "peer's",
        "ratio",
        "at most",
        "load",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.schedule,
            row.peer,
            f"{row.ideal_ms:.0f}",
            f"{row.shoal_overhead:.2%}",
            f"{row.peer_overhead:.2%}",
            _judged(row.ratio, row.most, verdict),
            f"{row.most:.2f}",
            f"{row.shoal_empty_ms:.2f}",
            f"{row.peer_empty_ms:.2f}",
            _judged(row.ratio_empty, row.most_empty, verdict),
            f"{row.most_empty:.2f}",
            f"{row.load:.1f}",
        )
    return table


def _judged(ratio: float, most: float, verdict: bool) -> str:
    text = f"{ratio:.2f}"
    return text if not verdict else f"[green]{text}[/]" if ratio <= most else f"[red]{text} ✗[/]"


if __name__ == "__main__":
    sys.exit(main())
