"""Trainers of the same model that take turns, step by step, in the same processes; and what their times say.

A machine's speed drifts by more than the difference between two good trainers. Whatever slows one step slows its
neighbour too, so each step of Shoal is divided by the peer's step beside it, and the median taken. Losses and gradient
norms are compared before anything is timed: a trainer that does other work has no time worth telling.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from bench.realtime import scheduling
from shoal.comm.collectives import barrier
from shoal.comm.world import World
from shoal.config import Model, Optimizer
from shoal.data.batches import Batch, Synthetic, mask_labels
from shoal.engine import Engine
from shoal.errors import ShoalError
from shoal.layout import Layout
from shoal.model.decoder import Decoder
from shoal.train.setup import materialise_alone

CHECKED = 5
"""Steps in which losses and norms must agree; they warm everything up as well, and none is timed."""

TOLERANCE = 1e-4
"""Largest relative difference of a loss or a norm, in float32. A NaN is larger."""

SEED = 0
OPTIMIZER = Optimizer(lr=3e-4, clip=0.1)
"""AdamW; the limit is so low that clipping acts in every step, for every trainer."""

Step = Callable[[Batch], tuple[float, float]]
"""One optimizer step over this rank's samples: the mean loss over all ranks, and the norm before clipping."""

SHOAL = "Shoal"


class TrainersDiffer(ShoalError):
    """The trainers do not do the same work, so their times would say nothing."""

    exit_code = 1


@dataclass(frozen=True)
class Case:
    """One size of the problem: ``samples`` of ``seq_len`` tokens a rank and step, in ``mb`` micro-batches."""

    shape: Model
    samples: int
    seq_len: int
    mb: int = 1
    pairs: int = 15

    def __str__(self) -> str:
        tokens = self.samples * self.seq_len
        return f"{self.parameters / 1e6:.1f} M, {tokens:,} tokens a rank, mb={self.mb}"

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in Decoder(self.shape).parameters())


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


def shoal(case: Case, layout: Layout, world: World) -> Step:
    """Shoal's engine on this rank."""
    with torch.device("meta"):
        model = Decoder(case.shape)
    engine = Engine(model, layout, optimizer=OPTIMIZER, seed=SEED, world=world)

    def step(batch: Batch) -> tuple[float, float]:
        result = engine.step(batch)
        return result.loss, result.grad_norm

    return step


def peer_model(case: Case) -> Decoder:
    """The same model with the same initial weights, without an engine."""
    with torch.device("meta"):
        model = Decoder(case.shape)
    materialise_alone(model, SEED)
    return model


def peer_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """PyTorch's fused AdamW with the same settings: matrices decay, vectors do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True)


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """The samples of a batch divided over ``count`` micro-batches, in order."""
    size = len(batch["tokens"]) // count
    return [{name: x[i * size : (i + 1) * size] for name, x in batch.items()} for i in range(count)]


def take_turns(world: World, case: Case, trainers: Mapping[str, Step], realtime: bool) -> Outcome:
    """Check that ``trainers`` (Shoal and its peers, by name) agree, then time them in turn, on this rank.

    Every step is fed the same samples to each trainer and starts when all ranks are ready. Raises
    :class:`TrainersDiffer`.
    """
    source = Synthetic(vocab=case.shape.vocab, seq_len=case.seq_len, batch=case.samples * world.size, seed=SEED)
    batches = [mask_labels(source.batch(step, world.rank, world.size), SEED) for step in range(CHECKED + case.pairs)]
    difference = _compare(trainers, batches[:CHECKED])
    clocks = {name: Clocks([], []) for name in trainers}
    gc.collect()
    with scheduling(realtime):
        for batch in batches[CHECKED:]:
            for name, step in trainers.items():
                barrier(world.everyone)
                wall, cpu = time.perf_counter(), time.process_time()
                step(batch)
                clocks[name].cpu.append(time.process_time() - cpu)
                clocks[name].wall.append(time.perf_counter() - wall)
    return Outcome(clocks, difference)


def _compare(trainers: Mapping[str, Step], batches: Sequence[Batch]) -> dict[str, float]:
    """The largest relative difference between the losses of Shoal and of each peer.

    Norms are compared in the first step, on equal weights: AdamW's first updates are near ±lr whatever the gradient's
    size, so rounding decides the sign of some and the norm shows it long before the loss does.
    """
    worst = {name: 0.0 for name in trainers if name != SHOAL}
    for number, batch in enumerate(batches, 1):
        seen = {name: step(batch) for name, step in trainers.items()}
        for name in worst:
            (loss, norm), (peer_loss, peer_norm) = seen[SHOAL], seen[name]
            worst[name] = max(worst[name], abs(loss - peer_loss) / abs(peer_loss))
            if not worst[name] <= TOLERANCE:
                raise TrainersDiffer(_differ("loss", number, loss, name, peer_loss))
            if number == 1 and not abs(norm - peer_norm) / peer_norm <= TOLERANCE:
                raise TrainersDiffer(_differ("gradient norm", number, norm, name, peer_norm))
    return worst


def _differ(what: str, number: int, ours: float, peer: str, theirs: float) -> str:
    return (
        f"step {number}: the {what} is {ours:.9g} with Shoal and {theirs:.9g} with {peer}, "
        f"further apart than {TOLERANCE:g} (relative); nothing was timed"
    )


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
