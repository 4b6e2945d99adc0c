"""``python -m bench``: every comparison, one table. Ratios are Shoal's time over the peer's; below 1 is faster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import ddp, pipeline, server, single, tensor, zero
from bench.check import ALONE, check
from bench.pairs import CHECKED, SHOAL, Clocks, Contest, Outcome, Ratio, joined, over_ranks, ratio, rounds, take_turns
from bench.realtime import permitted, words_for
from bench.trainers import Case
from shoal.config import Model
from shoal.errors import ShoalError
from shoal.train.pool import Pool

TEN_MILLION = Model(layers=12, hidden=256, heads=8, kv_heads=8, ffn=688, vocab=4096, tied=True)
TWENTY_MILLION = Model(layers=10, hidden=384, heads=8, kv_heads=8, ffn=1024, vocab=8192, tied=True)

SIZES = (
    Case(TEN_MILLION, samples=4, seq_len=128),
    Case(TEN_MILLION, samples=4, seq_len=32),
    Case(TWENTY_MILLION, samples=8, seq_len=128),
)
QUICK = Case(TEN_MILLION, samples=4, seq_len=32, pairs=5)
WIDTH = 132
"""Columns of the table in a file or a pipe, which have no width of their own."""

CONTESTS = {
    "single": Contest("dp=1", single.PEERS),
    "ddp": Contest("dp=2", ddp.PEERS),
    "zero1": Contest("dp=2,zero=1", zero.OPTIMIZER_STATES),
    "zero2": Contest("dp=2,zero=2", zero.GRADIENTS),
    "zero3": Contest("dp=2,zero=3", zero.PARAMETERS),
    "server": Contest("dp=2,sync=server", server.PEERS),
    "server4": Contest("dp=4,sync=server", server.PEERS),
    "servers4": Contest("dp=4,sync=server/4", server.PEERS),
    "tensor": Contest("tp=2", tensor.PEERS),
    "gpipe": Contest("pp=2:gpipe", pipeline.GPIPE, mbs=(4, 8)),
    "1f1b": Contest("pp=2:1f1b", pipeline.ONE_F_ONE_B, mbs=(4, 8)),
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    peer: str
    size: str
    pairs: int
    wall: Ratio
    cpu: Ratio
    loss_difference: float
    step_s: dict[str, float]
    """Median seconds of a step: wall and CPU, ours and the peer's."""
    best: bool = True
    """Whether no other peer of this contest was faster: the one that Shoal is measured by."""


@dataclass(frozen=True)
class Agreement:
    """One line of the table of ``--check``."""

    what: str
    trainer: str
    size: str
    loss_difference: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 when a trainer does other work than another."""
    options = _options(arguments)
    contests = [CONTESTS[name] for name in options.only or CONTESTS]
    not_built = [contest.line for contest in contests if not contest.built]
    realtime = options.rt and permitted()
    rows: list[Row] = []
    agreements: list[Agreement] = []
    try:
        if options.only and not options.check:
            for contest in contests:
                contest.layout.check_built()
        contests = [contest for contest in contests if contest.built or options.check]
        work = [(contest, case) for contest in contests for case in _cases(contest, options)]
        watched = Console(stderr=True)
        for contest, case in track(work, "measuring", console=watched, disable=not watched.is_terminal):
            if options.check:
                agreements += _agreements(contest, case, _fresh(contest, check, case))
            else:
                seen = [_fresh(contest, take_turns, part, realtime) for part in rounds(case)]
                rows += _rows(contest, case, [joined(rank) for rank in zip(*seen, strict=True)])
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    scheduling = words_for(realtime, options.rt)
    if options.json:
        found = [asdict(row) for row in agreements or rows]
        print(json.dumps({"scheduling": scheduling, "not_built": not_built, "rows": found}))
        return 0
    shown = Console()
    if not shown.is_terminal:
        shown.width = WIDTH
    shown.print(_agreement_table(agreements) if options.check else _table(rows, scheduling))
    if not_built:
        shown.print(f"Shoal does not have these yet: {'  '.join(not_built)}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Shoal beside its peers, step by step in the same processes. Ratios are Shoal / peer.",
        epilog="example: python -m bench --only ddp zero3 --quick",
    )
    parser.add_argument("--only", nargs="+", choices=list(CONTESTS), metavar="NAME", help=f"of {', '.join(CONTESTS)}")
    parser.add_argument("--quick", action="store_true", help="only the smallest size, 5 pairs")
    parser.add_argument("--pairs", type=int, default=0, metavar="N", help="pairs of steps of every size (default: 15)")
    parser.add_argument("--check", action="store_true", help=f"time nothing; compare losses with {ALONE}")
    parser.add_argument("--rt", action="store_true", help="real-time scheduling where it is permitted")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args(arguments)
    if options.pairs < 0:
        parser.error(f"--pairs = {options.pairs}: must be at least 1; use 15 for a steady median")
    return options


def _cases(contest: Contest, options: argparse.Namespace) -> list[Case]:
    if options.check:
        return [replace(QUICK, mb=mb) for mb in contest.mbs]
    if options.quick:
        cases = [replace(QUICK, mb=contest.mbs[0])]
    else:
        cases = [replace(size, mb=mb) for size in SIZES for mb in contest.mbs]
    return [replace(case, pairs=options.pairs or case.pairs) for case in cases]


def _fresh(contest: Contest, task: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``task`` on each rank of the contest, in processes that have done nothing else."""
    with Pool(contest.layout.ranks, threads=1) as pool:
        return pool.run(task, contest, *arguments)


def _agreements(contest: Contest, case: Case, differences: Sequence[dict[str, float]]) -> list[Agreement]:
    return [
        Agreement(contest.what, trainer, str(case), max(rank[trainer] for rank in differences))
        for trainer in differences[0]
    ]


def _rows(contest: Contest, case: Case, outcomes: Sequence[Outcome]) -> list[Row]:
    rows = [_row(contest, case, peer, outcomes) for peer in contest.peers]
    hardest = max(rows, key=lambda row: row.wall.of_pairs)
    return [replace(row, best=row is hardest) for row in rows]


def _row(contest: Contest, case: Case, peer: str, outcomes: Sequence[Outcome]) -> Row:
    ours, theirs = over_ranks(outcomes, SHOAL), over_ranks(outcomes, peer)
    return Row(
        what=contest.what,
        peer=peer,
        size=str(case),
        pairs=case.pairs,
        wall=ratio(ours.wall, theirs.wall),
        cpu=ratio(ours.cpu, theirs.cpu),
        loss_difference=max(outcome.difference[peer] for outcome in outcomes),
        step_s=_medians("shoal", ours) | _medians("peer", theirs),
    )


def _medians(who: str, clocks: Clocks) -> dict[str, float]:
    return {f"{who}_wall": median(clocks.wall), f"{who}_cpu": median(clocks.cpu)}


def _table(rows: Sequence[Row], scheduling: str) -> Table:
    table = Table(
        title="Shoal's time over the peer's (below 1, Shoal is faster)",
        caption=f"median over pairs of steps (ratio of the medians); one thread a rank; * the best peer, by wall time\n"
        f"scheduling: {scheduling}",
    )
    for name in ("what", "peer", "size", "pairs", "wall ratio", "CPU ratio", "losses differ by"):
        table.add_column(name, justify="left" if name in ("what", "peer", "size") else "right")
    for row in rows:
        ratios = [f"{r.of_pairs:.3f} ({r.of_medians:.3f})" for r in (row.wall, row.cpu)]
        table.add_row(
            row.what,
            row.peer + (" *" if row.best else ""),
            row.size,
            str(row.pairs),
            *ratios,
            f"{row.loss_difference:.0e}",
        )
    return table


def _agreement_table(agreements: Sequence[Agreement]) -> Table:
    table = Table(title=f"Losses of {CHECKED} steps beside {ALONE}", caption="largest relative difference")
    for name in ("what", "trainer", "size"):
        table.add_column(name)
    table.add_column("losses differ by", justify="right")
    for one in agreements:
        table.add_row(one.what, one.trainer, one.size, f"{one.loss_difference:.0e}")
    return table


if __name__ == "__main__":
    sys.exit(main())
