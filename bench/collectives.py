"""``python -m bench.collectives``: what ranks of one machine exchange through shared memory, beside gloo and a copy.

The same calls, over two worlds of the same processes: one whose ranks share memory, with tensors that lie anywhere (as
activations do) and with those of ``World.zeros`` (as gradients and gathered parameters do), and one over gloo. Their
results are compared bit for bit; then all take turns. One turn is a plain copy, ``torch.Tensor.copy_``, by all ranks at
once, of the bytes that a rank must at least take in or give out, whatever the algorithm. Of N bytes on P ranks:

all-reduce       N a rank, the same on all; 2(P-1)/P N must be taken in
reduce-scatter   N a rank, N/P of the sum to each; (P-1)/P N
all-gather       N/P from each rank, N on all; (P-1)/P N
broadcast        N from one rank to all; N
all-to-all       N a rank, N/P of it to each, and N/P kept; (P-1)/P N
send/receive     N from each even rank to the next; N

A time is that of the slowest rank, from a barrier on. Small messages are timed several calls at a time, each of which
waits for its result. Shared memory is to be at least 4 times as fast as gloo from 16 MiB on and within 2 of the copy,
and nowhere slower than gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor

from bench.pairs import Clocks, Outcome, in_turn, over_ranks
from bench.realtime import cores_for, permitted, scheduling, words_for
from shoal.comm.collectives import (
    all_reduce,
    barrier,
    broadcast,
    start_all_gather,
    start_exchange,
    start_reduce_scatter,
)
from shoal.comm.point_to_point import start_receive, start_send
from shoal.comm.world import Group, World
from shoal.errors import ShoalError
from shoal.train.pool import Pool

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
RANKS = (2, 4)
LARGE = 16 * MIB
"""From here on messages count as large."""
LEAST_LARGE, LEAST_SMALL = 4.0, 1.0
"""How many times as fast as gloo Shoal's is to be."""
MOST_COPIES = 2.0
"""Of the copy's time, what it may take for large messages."""
TURNS, WARM = 9, 2
ANYWHERE, ZEROS, GLOO, COPY = "anywhere", "World.zeros", "gloo", "copy"
"""What takes turns: shared memory, by where the tensors lie, and what it is measured by."""

Call = Callable[[], None]


def _all_reduce(group: Group, full: Tensor, result: Tensor) -> None:
    all_reduce(result, group, "bench")


def _reduce_scatter(group: Group, full: Tensor, result: Tensor) -> None:
    start_reduce_scatter(result.tensor_split(group.size)[0], full, group, "bench").wait()


def _all_gather(group: Group, full: Tensor, result: Tensor) -> None:
    start_all_gather(result, full.tensor_split(group.size)[group.index], group, "bench").wait()


def _broadcast(group: Group, full: Tensor, result: Tensor) -> None:
    broadcast(full if group.index == 0 else result, group, "bench")


def _all_to_all(group: Group, full: Tensor, result: Tensor) -> None:
    others = len(full) // group.size * (group.size - 1)
    sizes = [0 if rank == group.index else len(full) // group.size for rank in range(group.size)]
    start_exchange(result[:others], sizes, full[:others], sizes, group, "bench").wait()


def _send_receive(group: Group, full: Tensor, result: Tensor) -> None:
    if group.index % 2 == 0:
        start_send(full, group, group.index + 1, 0).wait()
    else:
        start_receive(result, group, group.index - 1, 0, "bench").wait()


@dataclass(frozen=True)
class Exchange:
    """One way to exchange: ``call(group, full, result)``, both flat and of the N bytes of a rank, and the part of N
    that P ranks must at least take in or give out."""

    call: Callable[[Group, Tensor, torch.Tensor], None]
    part: Callable[[int], float]


EXCHANGES = {
    "all-reduce": Exchange(_all_reduce, lambda ranks: 2 * (ranks - 1) / ranks),
    "reduce-scatter": Exchange(_reduce_scatter, lambda ranks: (ranks - 1) / ranks),
    "all-gather": Exchange(_all_gather, lambda ranks: (ranks - 1) / ranks),
    "broadcast": Exchange(_broadcast, lambda ranks: 1.0),
    "all-to-all": Exchange(_all_to_all, lambda ranks: (ranks - 1) / ranks),
    "send/receive": Exchange(_send_receive, lambda ranks: 1.0),
}


@dataclass(frozen=True)
class Row:
    """One line of the table. Medians over turns: milliseconds of the slowest rank, processor milliseconds of all."""

    what: str
    ranks: int
    size: int
    """Bytes."""
    where: str
    """The tensors lie."""
    shared_ms: float
    gloo_ms: float
    copy_ms: float
    shared_cpu_ms: float
    gloo_cpu_ms: float
    load: float

    @property
    def of_gloo(self) -> float:
        """How many times as fast as gloo."""
        return self.gloo_ms / self.shared_ms

    @property
    def copies(self) -> float:
        """How many times as long as the copy."""
        return self.shared_ms / self.copy_ms

    @property
    def slower(self) -> bool:
        """Than it is to be, beside gloo."""
        return self.of_gloo < (LEAST_LARGE if self.size >= LARGE else LEAST_SMALL)

    @property
    def longer(self) -> bool:
        """Than it is to be, beside the copy."""
        return self.size >= LARGE and self.copies > MOST_COPIES


class NothingToCompare(ShoalError):
    """The carriers do not have the same results, or ranks cannot share memory here."""

    exit_code = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for. Under real-time scheduling 1 when a target is missed; else there is no verdict."""
    options = _options(arguments)
    realtime = options.rt and permitted()
    names = options.only or list(EXCHANGES)
    how = words_for(realtime, options.rt)
    rows: list[Row] = []
    watched, shown = Console(stderr=True), Console(soft_wrap=True, highlight=False)
    if not options.json:
        shown.print(_HEAD)
    try:
        with Pool(max(options.ranks), threads=1) as pool:
            work = [(ranks, name) for ranks in options.ranks for name in names]
            for ranks, name in track(work, "measuring", console=watched, disable=not watched.is_terminal):
                with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
                    meeting = str(Path(folder) / "gloo")
                    seen = pool.run(measure, name, SIZES, options.turns, meeting, realtime, ranks=ranks)
                for size, *outcomes in zip(SIZES, *seen, strict=True):
                    rows += rows_of(name, size, outcomes)
                if not options.json:
                    shown.print("\n".join(map(_line, rows[-2 * len(SIZES) :])) + "\n")
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps({"scheduling": how, "rows": [_told(row) for row in rows]}))
    else:
        shown.print(_FOOT + f"\nscheduling: {how}" + ("" if realtime else "; without SCHED_FIFO there is no verdict"))
    return int(any(realtime and cores_for(row.ranks) and (row.slower or row.longer) for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.collectives",
        description="What ranks of one machine exchange through shared memory, beside gloo and a copy.",
        epilog="example: python -m bench.collectives --only all-reduce --ranks 2 --rt",
    )
    names = list(EXCHANGES)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=RANKS, metavar="P", help=f"of {RANKS}")
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N", help=f"of each (default: {TURNS})")
    parser.add_argument("--rt", action="store_true", help="real-time scheduling where it is permitted")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args(arguments)
    if options.turns < 1:
        parser.error(f"--turns = {options.turns}: must be at least 1; use {TURNS} for a steady median")
    return options


def measure(world: World, name: str, sizes: Sequence[int], turns: int, meeting: str, realtime: bool) -> list[Outcome]:
    """Compare the results of both carriers, then time them and the copy in turn, on this rank: seconds of one call, for
    each of ``sizes`` in bytes. The world over gloo meets at the file ``meeting``. Raises :class:`NothingToCompare`.
    """
    if world.carrier != "shared":
        raise NothingToCompare(f"ranks exchange over {world.carrier} here; it takes Linux, and room in /dev/shm")
    store = dist.FileStore(meeting, world.size)
    with World(world.rank, world.size, store, name="gloo", share=False) as other:
        most = max(sizes) // 4
        space = {where: (torch.zeros(most), torch.zeros(most)) for where in (ANYWHERE, GLOO)}
        space[ZEROS] = world.zeros(most, dtype=torch.float32), world.zeros(most, dtype=torch.float32)
        groups = {ANYWHERE: world.everyone, ZEROS: world.everyone, GLOO: other.everyone}

        def calls(size: int) -> dict[str, Call]:
            found: dict[str, Call] = {}
            first: Tensor | None = None
            for where, (full, result) in space.items():
                full, result = full[: size // 4], result[: size // 4]
                full.random_(-64, 64, generator=torch.Generator().manual_seed(world.rank))
                result.copy_(full)  # which an all-reduce reads, too
                found[where] = partial(EXCHANGES[name].call, groups[where], full, result)
                found[where]()
                first = result.clone() if first is None else first
                if not torch.equal(result, first):
                    raise NothingToCompare(f"{name} of {size} bytes on {world.size} ranks: results differ")
                result.zero_()  # sums of sums would grow without end
            return found | {COPY: _copy(full, EXCHANGES[name].part(world.size))}

        return [_take_turns(world, calls(size), max(1, min(16, MIB // size)), turns, realtime) for size in sizes]


def _take_turns(world: World, calls: dict[str, Call], several: int, turns: int, realtime: bool) -> Outcome:
    clocks = {who: Clocks([], []) for who in calls}
    with scheduling(realtime, ranks=world.size, ahead=0):  # a rank has nothing to do while gloo's threads work
        for turn in range(WARM + turns):
            for who in in_turn(list(calls), turn):
                wall_s, cpu_s = _timed(calls[who], several, world)
                if turn >= WARM:
                    clocks[who].wall.append(wall_s)
                    clocks[who].cpu.append(cpu_s)
    return Outcome(clocks, {})


def _copy(full: Tensor, part: float) -> Call:
    """A copy of that part of ``full``."""
    source = full.repeat(2)[: round(len(full) * part)]
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)

    return copy


def _timed(call: Call, several: int, world: World) -> tuple[float, float]:
    """Wall and processor seconds of one of several calls."""
    barrier(world.everyone)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(several):
        call()
    cpu_s = time.process_time() - cpu
    return (time.perf_counter() - wall) / several, cpu_s / several


def rows_of(name: str, size: int, seen: Sequence[Outcome]) -> list[Row]:
    """Lines of the table, from what each rank saw."""
    clocks = {who: over_ranks(seen, who) for who in (ANYWHERE, ZEROS, GLOO, COPY)}
    return [
        Row(
            what=name,
            ranks=len(seen),
            size=size,
            where=where,
            shared_ms=1e3 * median(clocks[where].wall),
            gloo_ms=1e3 * median(clocks[GLOO].wall),
            copy_ms=1e3 * median(clocks[COPY].wall),
            shared_cpu_ms=1e3 * median(clocks[where].cpu),
            gloo_cpu_ms=1e3 * median(clocks[GLOO].cpu),
            load=os.getloadavg()[0],
        )
        for where in (ANYWHERE, ZEROS)
    ]


def _told(row: Row) -> dict[str, object]:
    return asdict(row) | {"of_gloo": row.of_gloo, "copies": row.copies, "missed": row.slower or row.longer}


_HEAD = (
    f"Shared memory beside gloo (at least {LEAST_LARGE:g} times as fast from {LARGE // MIB} MiB, "
    f"{LEAST_SMALL:g} below) and beside a copy (at most {MOST_COPIES:g} of it)\n"
    f"{'what':<14}  {'ranks':>5}  {'N':>7}  {'tensors':<11}  {'ms':>8}  {'gloo ms':>8}  {'times as fast':>13}  "
    f"{'copy ms':>8}  {'copies':>6}  {'CPU ms':>8}  {'gloo CPU':>8}"
)
_FOOT = """a copy: by all ranks at once, of what each must take in or give out: of N bytes on P ranks 2(P-1)/P N for an
all-reduce; N for broadcast and send/receive; (P-1)/P N for others. Medians of the slowest rank; CPU: of all"""


def _line(row: Row) -> str:
    return (
        f"{row.what:<14}  {row.ranks:>5}  {_shown(row.size):>7}  {row.where:<11}  {row.shared_ms:>8.3f}  "
        f"{row.gloo_ms:>8.3f}  {row.of_gloo:>11.2f} {'!' if row.slower else ' '}  {row.copy_ms:>8.3f}  "
        f"{row.copies:>5.2f}{'!' if row.longer else ' '}  {row.shared_cpu_ms:>8.3f}  {row.gloo_cpu_ms:>8.3f}"
    )


def _shown(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


if __name__ == "__main__":
    sys.exit(main())
