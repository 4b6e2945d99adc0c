"""Trainers of the same model that take turns, step by step, in the same processes; and what their times say.

A machine's speed drifts by more than the difference between two good trainers. Whatever slows one step slows its
neighbour too, so each step of Shoal is divided by the peer's step beside it, and the median taken. Who goes first
alternates, for the second finds the batch in the cache and the processor as the first has left it. Processes differ
too: where the allocator happens to put a trainer's tensors is worth several per cent of its step for as long as the
process lives. So the pairs are taken in rounds, each in fresh processes. Losses and gradient norms are compared before
anything is timed: a trainer that does other work has no time worth telling.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

from bench.realtime import scheduling
from bench.trainers import SEED, Case, Peer, Step, shoal
from shoal.comm.collectives import barrier
from shoal.comm.world import World
from shoal.data.batches import Batch, Synthetic, mask_labels
from shoal.errors import LayoutError, ShoalError
from shoal.layout import Layout
from shoal.mesh import Grid

CHECKED = 5
"""Steps in which losses and norms must agree; they warm everything up as well, and none is timed."""

ROUND = 4
"""Pairs that are taken in the same processes; even, so that each trainer goes first as often as the other."""

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4
"""Largest relative differences. PyTorch adds up its norm in float32: at 20 M gradients it is off by 1e-5 by itself."""

SHOAL = "Shoal"


class TrainersDiffer(ShoalError):
    """The trainers do not do the same work, so their times would say nothing."""

    exit_code = 1


@dataclass(frozen=True)
class Contest:
    """Shoal under a layout, given as a line, against its peers, by name; ``mbs`` are the numbers of micro-batches."""

    line: str
    peers: Mapping[str, Peer]
    mbs: tuple[int, ...] = (1, 4)

    @property
    def layout(self) -> Layout:
        return Layout.parse(self.line)

    @property
    def what(self) -> str:
        """What the table calls it."""
        return self.line if self.layout.ranks > 1 else "one process"

    @property
    def built(self) -> bool:
        """Whether Shoal can run the layout yet."""
        with suppress(LayoutError):
            self.layout.check_built()
            return True
        return False

    def shoal(self, case: Case, world: World) -> Step:
        """Shoal under the layout, with the micro-batches of ``case``."""
        return shoal(case, replace(self.layout, mb=case.mb), world)

    def batches(self, case: Case, world: World, steps: int) -> list[Batch]:
        """What this rank's replica of the model reads in each of the first steps."""
        grid = Grid(self.layout.axes)
        return read(case, grid.size, steps, grid.coords(world.rank)["dp"], self.layout.dp)


@dataclass(frozen=True)
class Clocks:
    """Seconds of each timed step of one trainer: wall-clock, and of the processor."""

    wall: list[float]
    cpu: list[float]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw: the clocks of each trainer, and the peers' largest relative difference of a loss."""

    clocks: dict[str, Clocks]
    difference: dict[str, float]


@dataclass(frozen=True)
class Ratio:
    """Shoal's time over the peer's: the median over pairs of neighbouring steps, and the ratio of the medians."""

    of_pairs: float
    of_medians: float


def take_turns(world: World, contest: Contest, case: Case, realtime: bool) -> Outcome:
    """Check that Shoal and its peers agree, then time them in turn, on this rank.

    Every step is fed the same samples to each trainer and starts when all ranks are ready. Raises
    :class:`TrainersDiffer`.
    """
    world.default_group()  # the peers', which Shoal needs not
    trainers = {SHOAL: contest.shoal(case, world)} | {name: make(case, world) for name, make in contest.peers.items()}
    batches = contest.batches(case, world, CHECKED + case.pairs)
    steps = [{name: step(batch) for name, step in trainers.items()} for batch in batches[:CHECKED]]
    difference = compare(SHOAL, steps)
    clocks = {name: Clocks([], []) for name in trainers}
    gc.collect()
    with scheduling(realtime, ranks=world.size):
        for pair, batch in enumerate(batches[CHECKED:]):
            for name in in_turn(list(trainers), pair):
                barrier(world.everyone)
                wall, cpu = time.perf_counter(), time.process_time()
                trainers[name](batch)
                clocks[name].cpu.append(time.process_time() - cpu)
                clocks[name].wall.append(time.perf_counter() - wall)
    return Outcome(clocks, difference)


def rounds(case: Case) -> list[Case]:
    """The parts of a case that are measured each in processes of its own: at most ``ROUND`` pairs in one."""
    full, rest = divmod(case.pairs, ROUND)
    return [replace(case, pairs=pairs) for pairs in [ROUND] * full + [rest] * bool(rest)]


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """What a rank saw in all rounds."""

    def clocks(name: str) -> Clocks:
        parts = [outcome.clocks[name] for outcome in outcomes]
        return Clocks([s for part in parts for s in part.wall], [s for part in parts for s in part.cpu])

    first = outcomes[0]
    difference = {name: max(outcome.difference[name] for outcome in outcomes) for name in first.difference}
    return Outcome({name: clocks(name) for name in first.clocks}, difference)


def read(case: Case, ranks: int, steps: int, part: int = 0, parts: int = 1) -> list[Batch]:
    """A part of the samples of each step, by ``ranks`` ranks, their labels masked unequally."""
    source = Synthetic(vocab=case.shape.vocab, seq_len=case.seq_len, batch=case.samples * ranks, seed=SEED)
    return [mask_labels(source.batch(step, part, parts), SEED) for step in range(steps)]


def in_turn(names: Sequence[str], pair: int) -> Sequence[str]:
    """Who steps in which order in a pair: forwards, then backwards, then forwards."""
    return names if pair % 2 == 0 else names[::-1]


def compare(reference: str, steps: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """The largest relative difference, over ``steps``, between the loss of each trainer and of the one called
    ``reference``. ``steps`` has the loss and the norm of every trainer. Raises :class:`TrainersDiffer`.

    Norms are compared in the first step, on equal weights: AdamW's first updates are near ±lr whatever the gradient's
    size, so rounding decides the sign of some and the norm shows it long before the loss does.
    """
    worst = {name: 0.0 for name in steps[0] if name != reference}
    for number, seen in enumerate(steps, 1):
        for name in worst:
            loss, norm = (abs(a - b) / abs(b) for a, b in zip(seen[name], seen[reference], strict=True))
            if not (loss <= LOSS_TOLERANCE and (norm <= NORM_TOLERANCE or number > 1)):  # a NaN is not
                said = (f"{seen[who][0]:.9g} and {seen[who][1]:.9g} with {who}" for who in (reference, name))
                raise TrainersDiffer(
                    f"step {number}: loss and gradient norm are {', '.join(said)}; they may differ by "
                    f"{LOSS_TOLERANCE:g} and {NORM_TOLERANCE:g} of themselves; nothing was timed"
                )
            worst[name] = max(worst[name], loss)
    return worst


def over_ranks(outcomes: Sequence[Outcome], name: str) -> Clocks:
    """The clocks of a trainer over all ranks: a step lasts as long as on its slowest rank, and costs the sum."""
    ranks = [outcome.clocks[name] for outcome in outcomes]
    return Clocks(
        [max(steps) for steps in zip(*(rank.wall for rank in ranks), strict=True)],
        [sum(steps) for steps in zip(*(rank.cpu for rank in ranks), strict=True)],
    )


def ratio(ours: Sequence[float], peer: Sequence[float]) -> Ratio:
    """How the times of neighbouring steps compare: below 1, Shoal is faster."""
    pairs = [a / b for a, b in zip(ours, peer, strict=True)]
    return Ratio(median(pairs), median(ours) / median(peer))
