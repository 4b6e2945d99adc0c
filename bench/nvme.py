"""``python -m bench.nvme``: what a swap file reads and writes, beside a plain loop on the same disk.

The loop is direct ``pwrite`` and ``pread`` of whole transfers, one after the other, in the file that the swap file has.
The swap file has three transfers under way at a time, as the optimizer step has: one buffer being filled, one in use,
one being emptied. Both move the same bytes from and to the same memory, in turn, and ratios are medians over neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.pairs import in_turn
from shoal.errors import ShoalError
from shoal.memory.buffers import Buffers
from shoal.memory.swap import SwapFile, Transfer

MIB = 1 << 20
DEPTH = 3
TARGET = 0.8
"""Of the plain loop's bandwidth."""
SHOAL, LOOP = "Shoal", "plain loop"


@dataclass(frozen=True)
class Row:
    """One direction of one size: medians in GB/s, CPU milliseconds a GB, and the ratio of bandwidths."""

    what: str
    mib: int
    direct: bool
    gb_per_s: dict[str, float]
    cpu_ms_per_gb: dict[str, float]
    ratio: float
    load: float

    @property
    def met(self) -> bool:
        return self.ratio >= TARGET


def measure(folder: Path, mib: int, total_mib: int, rounds: int, threads: int) -> list[Row]:
    """Write and read ``total_mib`` in transfers of ``mib``, by the loop and by the swap file in turn."""
    size = mib * MIB
    offsets = range(0, total_mib * MIB // size * size, size)
    swap = SwapFile(folder, len(offsets) * size, threads=threads)
    data = [Buffers(size).take(size).fill_(number + 1) for number in range(DEPTH)]
    descriptor = swap._file.fileno()  # for both the same place on the disk
    views = [one.numpy().data for one in data]

    def loop(call: Callable[[int, Sequence[memoryview], int], int]) -> None:
        for number, offset in enumerate(offsets):
            assert call(descriptor, [views[number % DEPTH]], offset) == size

    def deep(start: Callable[[int, torch.Tensor], Transfer]) -> None:
        under_way: deque[Transfer] = deque()
        for number, offset in enumerate(offsets):
            if len(under_way) == DEPTH:
                under_way.popleft().wait()
            under_way.append(start(offset, data[number % DEPTH]))
        for transfer in under_way:
            transfer.wait()

    loop(os.pwritev)  # nothing is timed that writes to a place for the first time
    rows = []
    for what, call, start in (("write", os.pwritev, swap.write), ("read", os.preadv, swap.read)):
        subjects = {LOOP: lambda call=call: loop(call), SHOAL: lambda start=start: deep(start)}
        wall: dict[str, list[float]] = {name: [] for name in subjects}
        cpu: dict[str, list[float]] = {name: [] for name in subjects}
        for round_ in range(rounds):
            for name in in_turn(list(subjects), round_):
                began, spent = time.perf_counter(), time.process_time()
                subjects[name]()
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - spent)
        moved = len(offsets) * size / 1e9
        rows.append(
            Row(
                what,
                mib,
                swap.direct,
                {name: moved / median(took) for name, took in wall.items()},
                {name: 1e3 * median(took) / moved for name, took in cpu.items()},
                median(theirs / ours for theirs, ours in zip(wall[LOOP], wall[SHOAL], strict=True)),
                os.getloadavg()[0],
            )
        )
    swap.close()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; 1 when a target is missed with direct I/O."""
    options = _options(arguments)
    watched = Console(stderr=True)
    rows: list[Row] = []
    try:
        for mib in track(options.mib, "measuring", console=watched, disable=not watched.is_terminal):
            rows += measure(options.folder, mib, options.total, options.rounds, options.threads)
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        shown = Console()
        if not shown.is_terminal:
            shown.width = 132
        shown.print(_table(rows, options.folder))
    return int(any(row.direct and not row.met for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nvme",
        description="What a swap file reads and writes, beside a plain loop of direct reads and writes.",
        epilog="example: python -m bench.nvme --folder /mnt/nvme --mib 16",
    )
    folder = Path(tempfile.gettempdir())
    parser.add_argument("--folder", type=Path, default=folder, help=f"on the disk to measure ({folder})")
    parser.add_argument("--mib", nargs="+", type=int, default=[4, 16, 64], metavar="N", help="a transfer (4 16 64)")
    parser.add_argument("--total", type=int, default=512, metavar="MIB", help="the file (default: 512)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="passes of each (default: 9)")
    parser.add_argument("--threads", type=int, default=4, metavar="N", help="of the swap file (default: 4)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args(arguments)
    if not 0 < max(options.mib) <= options.total:
        parser.error(f"--mib = {max(options.mib)}: a transfer is 1 to {options.total} MiB, the file")
    return options


def _table(rows: Sequence[Row], folder: Path) -> Table:
    table = Table(
        title=f"A swap file in {folder}, {DEPTH} transfers under way",
        caption=f"ratio: Shoal's bandwidth over the loop's; at least {TARGET}",
    )
    for title in ("", "transfer", "direct", "Shoal GB/s", "loop GB/s", "ratio", "CPU ms/GB", "loop's", "load"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row.what,
            f"{row.mib} MiB",
            "yes" if row.direct else "no",
            f"{row.gb_per_s[SHOAL]:.2f}",
            f"{row.gb_per_s[LOOP]:.2f}",
            f"[green]{row.ratio:.2f}[/]" if row.met else f"[red]{row.ratio:.2f} ✗[/]",
            f"{row.cpu_ms_per_gb[SHOAL]:.0f}",
            f"{row.cpu_ms_per_gb[LOOP]:.0f}",
            f"{row.load:.1f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
