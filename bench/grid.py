"""``python -m bench.grid``: the kinds of tensor parallelism beside one another, and beside DTensor on a 2-D mesh.

For each number of ranks all trainers take turns in the same processes on the same samples, after their losses have been
compared. For each there are the words that a rank receives in a step (mean over the ranks), the bytes that it holds at
the worst moment (largest of the ranks), and the processor's seconds of all processes together, gloo's threads included.

What dividing itself costs is what lies above a step without communication: as many processes at once, each of which
trains by itself, on the whole batch, a model of the sizes that one rank has under 1-D: all of the hidden size, 1/P of
the heads, of the feed-forward columns and of the vocabulary. That has 1/P of the matrix products, as a rank has under
every kind, and the same strain on caches and cores; one process with the whole model would have neither. Norms and
residual sums are repeated on every rank in it, as under 1-D. Every trainer is measured above the same step of the same
turn.

There is no real-time scheduling here, as :mod:`bench` has: with more ranks than cores it hangs, for the ranks that poll
keep those they wait for from running.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import mean, median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.grid_counts import Counts, count
from bench.grid_peer import grid, replicas
from bench.pairs import Clocks, Contest, Outcome, compare, in_turn, over_ranks, read
from bench.single import plain
from bench.tensor import dtensor
from bench.trainers import Case, Peer, Step
from shoal.comm.collectives import barrier
from shoal.comm.world import World
from shoal.config import Model
from shoal.data.batches import Batch
from shoal.errors import ShoalError
from shoal.model.loss import IGNORED
from shoal.train.pool import Pool

TEN_MILLION = Model(layers=12, hidden=256, heads=8, kv_heads=8, ffn=688, vocab=4096, tied=True)
CASE = Case(TEN_MILLION, samples=4, seq_len=128, pairs=7)
QUICK = Case(TEN_MILLION.model_copy(update={"layers": 2}), samples=4, seq_len=32, pairs=3)
CHECKED = 2
"""Steps in which losses must agree; none is timed."""
COUNTED = 2
"""Steps under the meter, after those: the first shows it what is there, the second is told."""

ALONE = "no communication"
"""The step that every other one is measured above."""


@dataclass(frozen=True)
class Field:
    """Who is compared on ``ranks`` ranks: layouts, and PyTorch's on a mesh with ``columns`` columns."""

    ranks: int
    columns: int
    lines: tuple[str, ...]

    @property
    def mesh(self) -> str:
        return f"{self.ranks // self.columns}x{self.columns}"

    @property
    def ours(self) -> dict[str, Contest]:
        return {line: Contest(line, {}) for line in self.lines}

    @property
    def peers(self) -> dict[str, Peer]:
        return {
            "DTensor": dtensor,
            f"DTensor {self.mesh}, gathers": partial(grid, columns=self.columns, sums=False),
            f"DTensor {self.mesh}, sums": partial(grid, columns=self.columns, sums=True),
            f"FSDP2 x DTensor {self.mesh}": partial(replicas, columns=self.columns),
        }


FIELDS = (
    Field(4, 2, ("tp=4", "tp=4:1d-sp", "tp=4:2d", "tp=4:2d{form=loop}", "tp=4:1x2x2", "tp=4:2x1x2")),
    Field(8, 4, ("tp=8", "tp=8:1d-sp", "tp=8:2.5d", "tp=8:3d", "tp=8:1x2x4", "tp=8:2x1x4")),
)


@dataclass(frozen=True)
class Seen:
    """By one rank: the clocks of each trainer, the largest relative differences of a loss, and the counts."""

    outcome: Outcome
    counts: Mapping[str, Counts]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    ranks: int
    what: str
    words: float
    """Received by a rank in a step, mean over the ranks."""
    peak_mib: float
    """Of the rank that holds most."""
    cpu_s: float
    wall_s: float
    above_s: float
    """Median of the processor's seconds above those of the step without communication in the same turn."""
    of_dtensor: float
    """That over DTensor's on the mesh, in the form that has less of it."""
    of_fsdp2: float
    """The same, over that of FSDP2 and DTensor on the mesh."""
    loss_difference: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 when a trainer does other work than another."""
    options = _options(arguments)
    case = QUICK if options.quick else CASE
    case = replace(case, pairs=options.pairs or case.pairs)
    fields = [field for field in FIELDS if field.ranks in options.ranks]
    rows: list[Row] = []
    watched = Console(stderr=True)
    try:
        for field in track(fields, "measuring", console=watched, disable=not watched.is_terminal):
            with Pool(field.ranks, threads=1) as pool:
                rows += rows_of(field, pool.run(measure, field, case, ranks=field.ranks))
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    missing = [line for field in fields for line, contest in field.ours.items() if not contest.built]
    if options.json:
        print(json.dumps({"size": str(case), "not_built": missing, "rows": [asdict(row) for row in rows]}))
        return 0
    shown = Console()
    if not shown.is_terminal:
        shown.width = 132
    shown.print(_table(rows, case))
    if missing:
        shown.print(f"Shoal does not have these yet: {'  '.join(missing)}")
    return 0


def measure(world: World, field: Field, case: Case) -> Seen:
    """Check on this rank that all trainers agree, count what each moves and holds, then time them in turn.

    Raises :class:`TrainersDiffer`.
    """
    world.default_group()  # the peers', which Shoal needs not
    ours = {line: contest.shoal(case, world) for line, contest in field.ours.items() if contest.built}
    trainers = ours | {name: make(case, world) for name, make in field.peers.items()}
    batches = read(case, 1, CHECKED + COUNTED + case.pairs)
    reference = next(iter(trainers))
    checked = [{name: step(batch) for name, step in trainers.items()} for batch in batches[:CHECKED]]
    difference = {reference: 0.0} | compare(reference, checked)
    metered = batches[CHECKED : CHECKED + COUNTED]
    counts = {name: count(step, metered, world.ledger if name in ours else None) for name, step in trainers.items()}
    trainers[ALONE] = alone(case, world)
    counts[ALONE] = count(trainers[ALONE], metered)
    clocks = {name: Clocks([], []) for name in trainers}
    gc.collect()
    for pair, batch in enumerate(batches[CHECKED + COUNTED :]):
        for name in in_turn(list(trainers), pair):
            barrier(world.everyone)
            wall, cpu = time.perf_counter(), time.process_time()
            trainers[name](batch)
            clocks[name].cpu.append(time.process_time() - cpu)
            clocks[name].wall.append(time.perf_counter() - wall)
    return Seen(Outcome(clocks, difference), counts)


def alone(case: Case, world: World) -> Step:
    """A model of what one rank has under 1-D, trained by this process alone on all samples."""
    shape, ranks = case.shape, world.size
    share = shape.model_copy(
        update={
            "heads": shape.heads // ranks,
            "kv_heads": max(1, shape.kv_heads // ranks),
            "head_dim": shape.head_dim,
            "ffn": -(-shape.ffn // ranks),
            "vocab": -(-shape.vocab // ranks),
        }
    )
    step = plain(replace(case, shape=share), world)

    def within_its_words(batch: Batch) -> tuple[float, float]:
        labels = batch["labels"]
        folded = {
            "tokens": batch["tokens"] % share.vocab,
            "labels": labels.where(labels == IGNORED, labels % share.vocab),
        }
        return step(batch | folded)

    return within_its_words


def rows_of(field: Field, ranks: Sequence[Seen]) -> list[Row]:
    """The lines of the table, from what each rank saw."""
    outcomes = [seen.outcome for seen in ranks]
    floor = over_ranks(outcomes, ALONE).cpu
    clocks = {name: over_ranks(outcomes, name) for name in ranks[0].counts}
    above = {
        name: median(cpu - least for cpu, least in zip(seen.cpu, floor, strict=True)) for name, seen in clocks.items()
    }
    dtensor_least, fsdp2_least = (
        min(above[peer] for peer in field.peers if peer.startswith(f"{kind} {field.mesh}"))
        for kind in ("DTensor", "FSDP2 x DTensor")
    )
    rows = []
    for name in clocks:
        counts = [seen.counts[name] for seen in ranks]
        rows.append(
            Row(
                ranks=field.ranks,
                what=name,
                words=mean(one.words for one in counts),
                peak_mib=max(one.peak_bytes for one in counts) / 2**20,
                cpu_s=median(clocks[name].cpu),
                wall_s=median(clocks[name].wall),
                above_s=above[name],
                of_dtensor=above[name] / dtensor_least,
                of_fsdp2=above[name] / fsdp2_least,
                loss_difference=max(outcome.difference.get(name, 0.0) for outcome in outcomes),
            )
        )
    return rows


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.grid",
        description="Kinds of tensor parallelism beside one another and beside DTensor on a 2-D mesh.",
        epilog="example: python -m bench.grid --ranks 4 --quick",
    )
    sizes = [field.ranks for field in FIELDS]
    parser.add_argument("--ranks", nargs="+", type=int, choices=sizes, default=sizes, metavar="P", help=f"of {sizes}")
    parser.add_argument("--quick", action="store_true", help="a smaller size, 3 turns")
    parser.add_argument("--pairs", type=int, default=0, metavar="N", help=f"turns (default: {CASE.pairs})")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args(arguments)
    if options.pairs < 0:
        parser.error(f"--pairs = {options.pairs}: must be at least 1; use {CASE.pairs} for a steady median")
    return options


def _table(rows: Sequence[Row], case: Case) -> Table:
    table = Table(
        title=f"Tensor parallelism by kind: {case.parameters / 1e6:.1f} M parameters, "
        f"{case.samples * case.seq_len:,} tokens a step, float32",
        caption="a step: words received by a rank; the most a rank holds; processor seconds of all ranks together;\n"
        "how far those are above a step without communication; that over DTensor's, and FSDP2's with DTensor, on a\n"
        f"2-D mesh. Medians of {case.pairs} turns; one thread a rank",
    )
    columns = ("what", "words", "MiB", "wall s", "CPU s", "above", "of DTensor's", "of FSDP2's", "losses differ by")
    for name in columns:
        table.add_column(name, justify="left" if name == "what" else "right")
    for number, row in enumerate(rows):
        last = number + 1 == len(rows) or rows[number + 1].ranks != row.ranks
        numbers = (f"{row.words:,.0f}", f"{row.peak_mib:.1f}", f"{row.wall_s:.3f}", f"{row.cpu_s:.3f}")
        above = (f"{row.above_s:.3f}", f"{row.of_dtensor:.2f}", f"{row.of_fsdp2:.2f}", f"{row.loss_difference:.0e}")
        table.add_row(row.what, *numbers, *(() if row.what == ALONE else above), end_section=last)
    return table


if __name__ == "__main__":
    sys.exit(main())
