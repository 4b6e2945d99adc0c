"""``python -m bench.overhead``: what communication adds to a step, beside PyTorch's and DeepSpeed's.

Two ranks train the same model under Shoal and under each peer, with one micro-batch a step and with four, and as many
processes train it with the communication removed. All take turns, step by step, in the same processes, after their
losses have been compared (:mod:`bench.pairs`). The overhead of a step is how far it is above the step without
communication of the same turn, with as many micro-batches; a step lasts as long as on its slowest rank, and costs the
processor's seconds of all ranks, gloo's threads included.

A step without communication is plain PyTorch, on each rank by itself and on all of them at once:

dp=2          the whole model on this rank's samples, all of it updated
dp=2,zero=S   the same, but only half of the model is clipped and updated: what a rank does under ZeRO
tp=2          half of the heads, of the feed-forward columns and of the vocabulary, on all samples

A target is that Shoal's overhead is at most half of every peer's; another, for layouts that exchange once a step, that
it is with four micro-batches at most 1.05 of what it is with one. Micro-batches divide the tokens of a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median, quantiles

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import ddp, tensor, zero, zero_deepspeed
from bench.__main__ import QUICK, SIZES, WIDTH
from bench.grid import alone
from bench.pairs import CHECKED, SHOAL, Clocks, Contest, Outcome, compare, in_turn, joined, over_ranks, rounds
from bench.realtime import permitted, rest, scheduling, words_for
from bench.single import plain, share
from bench.trainers import Case, Peer, Step
from shoal.comm.collectives import barrier
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.train.pool import Pool

ALONE = "no communication"
MBS = (1, 4)
MOST = 0.5
"""Of a peer's overhead, what Shoal's may be."""
MOST_GROWTH = 1.05
"""Of its overhead with one micro-batch, what Shoal's may be with the most of :data:`MBS`."""


@dataclass(frozen=True)
class Duel:
    """A layout against its peers, above a step without communication. Peers that need DeepSpeed may be missing."""

    line: str
    floor: Peer
    peers: Mapping[str, Peer]
    deepspeed: int = 0
    """The stage of DeepSpeed's ZeRO that is a peer too, if any."""
    once: bool = True
    """Whether it exchanges once a step, however many micro-batches that has."""

    @property
    def contest(self) -> Contest:
        """With those peers that are there."""
        optional = zero_deepspeed.peers(self.deepspeed) if self.deepspeed and zero_deepspeed.INSTALLED else {}
        return Contest(self.line, {**self.peers, **optional}, MBS)

    @property
    def names(self) -> list[str]:
        """Of all peers."""
        return [*self.peers, *(zero_deepspeed.peers(self.deepspeed) if self.deepspeed else ())]


DUELS = {
    "ddp": Duel("dp=2", plain, ddp.PEERS),
    "zero1": Duel("dp=2,zero=1", share, zero.OPTIMIZER_STATES, deepspeed=1),
    "zero2": Duel("dp=2,zero=2", share, zero.OPTIMIZER_STATES, deepspeed=2),
    "zero3": Duel("dp=2,zero=3", share, zero.PARAMETERS, deepspeed=3, once=False),
    "zero3-step": Duel("dp=2,zero=3{keep=step}", share, zero.GRADIENTS, deepspeed=3),
    "tensor": Duel("tp=2", alone, tensor.PEERS, once=False),
}


@dataclass(frozen=True)
class Above:
    """Milliseconds of a step above the one without communication of the same turn: the median over the turns, and the
    distance between the quartiles."""

    median: float
    spread: float


@dataclass(frozen=True)
class Row:
    """One line of the table: Shoal beside a peer. A missing peer has no numbers, and one that is no slower than the
    step without communication no ratio."""

    what: str
    peer: str
    size: str
    mb: int
    floor_wall_ms: float
    shoal_wall: Above
    shoal_cpu: Above
    peer_wall: Above | None
    peer_cpu: Above | None
    load: float

    @property
    def wall(self) -> float | None:
        return _ratio(self.shoal_wall, self.peer_wall)

    @property
    def cpu(self) -> float | None:
        return _ratio(self.shoal_cpu, self.peer_cpu)

    @property
    def missed(self) -> bool:
        if self.peer_wall is None:
            return False
        return any(found is None or found > MOST for found in (self.wall, self.cpu))


@dataclass(frozen=True)
class Growth:
    """Shoal's overhead with many micro-batches beside that with one."""

    what: str
    size: str
    wall: float | None
    cpu: float | None
    most: float | None
    """What it may be, if anything."""

    @property
    def missed(self) -> bool:
        return self.most is not None and any(found is not None and found > self.most for found in (self.wall, self.cpu))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for. Under real-time scheduling 1 when a target is missed; else there is no verdict."""
    options = _options(arguments)
    duels = [DUELS[name] for name in options.only or DUELS]
    cases = [QUICK] if options.quick else [SIZES[number - 1] for number in options.sizes]
    cases = [replace(case, pairs=options.pairs or case.pairs) for case in cases]
    realtime = options.rt and permitted()
    if zero_deepspeed.INSTALLED and any(duel.deepspeed for duel in duels):
        zero_deepspeed.load()
    rows: list[Row] = []
    growths: list[Growth] = []
    watched = Console(stderr=True)
    try:
        work = [(duel, case) for duel in duels for case in cases]
        for duel, case in track(work, "measuring", console=watched, disable=not watched.is_terminal):
            seen = []
            for part in rounds(case):
                with Pool(2, threads=1) as pool:
                    seen.append(pool.run(measure, duel, part, realtime))
            outcomes = [joined(rank) for rank in zip(*seen, strict=True)]
            rows += rows_of(duel, case, outcomes)
            growths.append(growth_of(duel, case, outcomes))
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    how = words_for(realtime, options.rt)
    if options.json:
        print(json.dumps({"scheduling": how, "rows": [_told(row) for row in rows], "growth": [*map(_told, growths)]}))
    else:
        shown = Console()
        if not shown.is_terminal:
            shown.width = WIDTH
        shown.print(_table(rows, how, realtime), _growth_table(growths), sep="\n")
    return int(realtime and (any(row.missed for row in rows) or any(one.missed for one in growths)))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead",
        description="What communication adds to a step, beside PyTorch's and, where it is installed, DeepSpeed's "
        "(pip install '.[bench]'; neither MPI nor its launcher is needed; without it, its rows say n/a).",
        epilog="example: python -m bench.overhead --only ddp zero3 --sizes 2 --rt",
    )
    parser.add_argument("--only", nargs="+", choices=list(DUELS), metavar="NAME", help=f"of {', '.join(DUELS)}")
    numbers = range(1, len(SIZES) + 1)
    sizes = "; ".join(f"{number}: {size_of(case)}" for number, case in enumerate(SIZES, 1))
    parser.add_argument("--sizes", nargs="+", type=int, choices=numbers, default=[*numbers], metavar="N", help=sizes)
    parser.add_argument("--quick", action="store_true", help="only the smallest size, 5 turns")
    parser.add_argument("--pairs", type=int, default=0, metavar="N", help="turns of every size (default: 15)")
    parser.add_argument("--rt", action="store_true", help="real-time scheduling where it is permitted")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    options = parser.parse_args(arguments)
    if options.pairs < 0:
        parser.error(f"--pairs = {options.pairs}: must be at least 1; use 15 for a steady median")
    return options


def measure(world: World, duel: Duel, case: Case, realtime: bool) -> Outcome:
    """Check on this rank that all trainers agree, then time them in turn, with each number of micro-batches.

    Raises :class:`TrainersDiffer`.
    """
    world.default_group()  # the peers', which Shoal needs not
    contest = duel.contest
    steps: dict[str, Step] = {}
    for mb in MBS:
        part = replace(case, mb=mb)
        named = {SHOAL: contest.shoal(part, world), ALONE: duel.floor(part, world)}
        named |= {name: make(part, world) for name, make in contest.peers.items()}
        steps |= {label(name, mb): step for name, step in named.items()}
    batches = contest.batches(case, world, CHECKED + case.pairs)
    checked = [{name: step(batch) for name, step in steps.items()} for batch in batches[:CHECKED]]
    difference: dict[str, float] = {}
    for mb in MBS:
        names = [label(name, mb) for name in (SHOAL, *contest.peers)]
        difference |= compare(names[0], [{name: seen[name] for name in names} for seen in checked])
    clocks = {name: Clocks([], []) for name in steps}
    gc.collect()
    lasted = 0.0
    with scheduling(realtime, ranks=world.size):
        for turn, batch in enumerate(batches[CHECKED:]):
            for name in in_turn([*steps], turn):
                rest(lasted)
                barrier(world.everyone)
                wall, cpu = time.perf_counter(), time.process_time()
                steps[name](batch)
                clocks[name].cpu.append(time.process_time() - cpu)
                lasted = time.perf_counter() - wall
                clocks[name].wall.append(lasted)
    return Outcome(clocks, difference)


def label(name: str, mb: int) -> str:
    """What the clocks of a trainer are called that divides a step into micro-batches."""
    return f"{name}, mb={mb}"


def rows_of(duel: Duel, case: Case, outcomes: Sequence[Outcome]) -> list[Row]:
    """A line for every peer and number of micro-batches, from what each rank saw."""
    rows = []
    for mb in MBS:
        floor_ms = 1e3 * median(over_ranks(outcomes, label(ALONE, mb)).wall)
        wall, cpu = _above(outcomes, SHOAL, mb)
        for peer in duel.names:
            peer_wall, peer_cpu = _above(outcomes, peer, mb) if peer in duel.contest.peers else (None, None)
            rows.append(
                Row(
                    what=duel.line,
                    peer=peer,
                    size=size_of(case),
                    mb=mb,
                    floor_wall_ms=floor_ms,
                    shoal_wall=wall,
                    shoal_cpu=cpu,
                    peer_wall=peer_wall,
                    peer_cpu=peer_cpu,
                    load=os.getloadavg()[0],
                )
            )
    return rows


def growth_of(duel: Duel, case: Case, outcomes: Sequence[Outcome]) -> Growth:
    """How Shoal's overhead grows with the number of micro-batches."""
    many, one = (_above(outcomes, SHOAL, mb) for mb in (max(MBS), min(MBS)))
    wall, cpu = (_ratio(a, b) for a, b in zip(many, one, strict=True))
    return Growth(duel.line, size_of(case), wall, cpu, MOST_GROWTH if duel.once else None)


def _above(outcomes: Sequence[Outcome], name: str, mb: int) -> tuple[Above, Above]:
    """By wall and by processor."""
    step, floor = (over_ranks(outcomes, label(who, mb)) for who in (name, ALONE))
    return _differences(step.wall, floor.wall), _differences(step.cpu, floor.cpu)


def _differences(step_s: Sequence[float], floor_s: Sequence[float]) -> Above:
    found = [1e3 * (step - floor) for step, floor in zip(step_s, floor_s, strict=True)]
    low, _, high = quantiles(found, n=4, method="inclusive") if len(found) > 1 else (found[0],) * 3
    return Above(median(found), high - low)


def _ratio(ours: Above, theirs: Above | None) -> float | None:
    return None if theirs is None or theirs.median <= 0 else ours.median / theirs.median


def size_of(case: Case) -> str:
    """Parameters, and tokens of a rank and step."""
    return f"{case.parameters / 1e6:.1f} M x {case.samples * case.seq_len:,}"


def _told(one: Row | Growth) -> dict[str, object]:
    return asdict(one) | {"wall_ratio": one.wall, "cpu_ratio": one.cpu, "missed": one.missed}


def _table(rows: Sequence[Row], how: str, verdict: bool) -> Table:
    table = Table(
        title=f"Milliseconds a step above the one without communication (ratios: at most {MOST})",
        caption="size: parameters x tokens a rank and step; medians over turns ± half the distance between the "
        f"quartiles; one thread a rank\nscheduling: {how}"
        + ("" if verdict else "; without SCHED_FIFO there is no verdict"),
        padding=(0, 0, 0, 1),
    )
    for name in ("what", "size", "mb", "peer", "without", "Shoal's", "peer's", "ratio", "CPU", "peer's", "ratio"):
        table.add_column(name, justify="left" if name in ("what", "size", "peer") else "right", no_wrap=name != "peer")
    before: Row | None = None
    for row in rows:
        new = before is None or (before.what, before.size, before.mb) != (row.what, row.size, row.mb)
        if new and before is not None:
            table.add_section()
        first = (row.what, row.size, str(row.mb)) if new else ("", "", "")
        table.add_row(
            *first, row.peer, f"{row.floor_wall_ms:.0f}" if new else "",
            _ms(row.shoal_wall) if new else "", _ms(row.peer_wall), _shown(row.wall, MOST),
            _ms(row.shoal_cpu) if new else "", _ms(row.peer_cpu), _shown(row.cpu, MOST),
        )  # fmt: skip
        before = row
    return table


def _growth_table(growths: Sequence[Growth]) -> Table:
    table = Table(
        title=f"Shoal's with {max(MBS)} micro-batches over that with {min(MBS)} (at most {MOST_GROWTH})",
        caption="no limit where it exchanges once a micro-batch",
    )
    for name in ("what", "size", "wall", "CPU"):
        table.add_column(name, justify="left" if name in ("what", "size") else "right")
    for one in growths:
        table.add_row(one.what, one.size, _shown(one.wall, one.most), _shown(one.cpu, one.most))
    return table


def _ms(above: Above | None) -> str:
    return "n/a" if above is None else f"{above.median:.1f} ±{above.spread / 2:.1f}"


def _shown(found: float | None, most: float | None) -> str:
    return "n/a" if found is None else f"{found:.2f}" + (" !" if most is not None and found > most else "")


if __name__ == "__main__":
    sys.exit(main())
