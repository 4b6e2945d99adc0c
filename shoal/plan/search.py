"""The best splits of a job: all that the rules admit, less what cannot be best, the rest by what a step takes.

Three things are exact and cost little, so that few candidates are left to time: the rules of layouts; memory, of which
more recomputation and offload need less but take longer, so that of each split only the lightest that fits is kept; and
a lower bound of the step, in order of which candidates are timed until none that is left can be better.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.layout import Layout
from shoal.layout.kinds import SCHEDULES
from shoal.plan import clock
from shoal.plan.balance import balanced
from shoal.plan.cost import Estimate, StepTimes
from shoal.plan.layouts import layout_of, split_of
from shoal.plan.memory import GIB, Held, Memory
from shoal.plan.profile import Constants
from shoal.plan.work import Job, Split

_TIMED = 600
"""Candidates that are timed at most."""
_POWERS = (1, 2, 4, 8, 16)
"""Samples of a micro-batch."""
_BALANCED = 3
"""Plans whose layers are moved between stages."""
_LIGHTER = (("none", 0.0), ("selective", 0.0), ("full", 0.0), ("full", 0.5), ("full", 1.0))
"""Recomputation and the share of optimizer states that the host keeps, from what takes least time to what needs least
memory."""


class Plan(NamedTuple):
    """One split, priced."""

    split: Split
    estimate: Estimate
    held: Held

    @property
    def gib(self) -> float:
        """Of the rank that holds most."""
        return self.held.total / GIB


@dataclass
class Found:
    """What a search has seen."""

    plans: list[Plan]
    """Best first."""
    admitted: int = 0
    """Splits that the rules admit."""
    too_large: int = 0
    """Of these, do not fit however much is recomputed and offloaded."""
    timed: int = 0
    nearly: list[tuple[float, Split]] = field(default_factory=list)
    """Splits that would take less if only they fitted: lower bound, and the split without recomputation."""


class Search:
    """Looks for the best splits of one job."""

    def __init__(self, job: Job, constants: Constants, *, schedules: Sequence[str] = ()) -> None:
        self.job = job
        self.times = StepTimes(job, constants)
        self.memory = Memory(job)
        self._schedules = tuple(schedules) or ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")

    def run(self, best: int = 8) -> Found:
        """The ``best`` plans that differ in more than how samples are dealt out."""
        found = Found([])
        queue: list[tuple[float, int, Split, bool]] = []
        for split in splits(self.job, self._schedules):
            found.admitted += 1
            if self.memory.least(split) > self.memory.room:
                found.too_large += 1
            else:
                queue.append((self.times.bound(split), found.admitted, split, False))
        heapq.heapify(queue)
        plans: dict[tuple[object, ...], Plan] = {}
        worst = float("inf")
        while queue and found.timed < _TIMED:
            bound, number, split, fits = heapq.heappop(queue)
            if bound > worst:
                break
            if not fits:
                # Its bound holds for any variant of it: only now is it worth finding out which one fits.
                lighter = self._lightest(split, self.memory.room)
                if lighter != split and len(found.nearly) < 8:
                    found.nearly.append((bound, split))
                if lighter is None:
                    found.too_large += 1
                else:
                    heapq.heappush(queue, (self.times.bound(lighter), number, lighter, True))
                continue
            plan = self.price(split)
            found.timed += 1
            alike = split.tp, split.pp, split.ep, split.schedule, split.chunks, split.zero, split.cp > 1
            if alike not in plans or plan.estimate.step_s < plans[alike].estimate.step_s:
                plans[alike] = plan
            if len(plans) >= best:
                worst = sorted(one.estimate.step_s for one in plans.values())[best - 1]
        ranked = sorted(plans.values(), key=_seconds)[:best]
        found.plans = sorted([*map(self._balanced, ranked[:_BALANCED]), *ranked[_BALANCED:]], key=_seconds)
        return found

    def price(self, split: Split) -> Plan:
        """One split, whether it fits or not."""
        return Plan(split, self.times.estimate(split), self.memory.most(split))

    def own(self, layout: Layout) -> Plan:
        """A layout that somebody names; with more recomputation if it fits in no other way."""
        split = split_of(layout, self.job.batch)
        plan = self.price(split)
        if self.fits(plan):
            return plan
        lighter = self._lightest(split, self.memory.room)
        return self.price(lighter) if lighter else plan

    def line(self, plan: Plan) -> str:
        """The plan's layout, in one line."""
        job = self.job
        half = job.width == 2 and job.profile.gradient_bytes == 2
        return str(layout_of(plan.split, job.precision, half_grads=half))

    def mfu(self, plan: Plan) -> float:
        """Operations of the model, attention's counted in full and nothing twice, over the data sheet's rate."""
        job = self.job
        flops = job.shape.flops(job.seq) * job.batch * job.seq
        return flops / (plan.estimate.step_s * job.cluster.device.peak * 1e12 * plan.split.ranks)

    def fits(self, plan: Plan) -> bool:
        """Whether the margin is kept."""
        return plan.held.total <= self.memory.room

    def _balanced(self, plan: Plan) -> Plan:
        """The plan with its layers moved between stages, where that helps and fits."""
        layers = balanced(self.times, plan.split)
        if layers is None:
            return plan
        other = self.price(plan.split._replace(layers=layers))
        return other if other.estimate.step_s < plan.estimate.step_s and self.fits(other) else plan

    def _lightest(self, split: Split, room: float) -> Split | None:
        """The variant that fits and takes least time: the lightest recomputation and offload."""
        for recompute, offload in _LIGHTER:
            if recompute == "selective" and not self.memory.keeps_scores:
                continue
            lighter = split._replace(recompute=recompute, offload=offload)
            if self.memory.most(lighter).total <= room:
                return self._fewer(lighter, room)
        return None

    def _fewer(self, split: Split, room: float) -> Split:
        """The split with recomputation on as few ranks of the pipeline as do, from the first on: those have most
        micro-batches in flight."""
        if split.recompute == "none" or split.pp == 1 or SCHEDULES[split.schedule].chunks > 1:
            return split
        low, high = 1, split.pp
        while low < high:
            middle = (low + high) // 2
            some = split._replace(recomputing=middle)
            low, high = (low, middle) if self.memory.most(some).total <= room else (middle + 1, high)
        return split if low == split.pp else split._replace(recomputing=low)


def _seconds(plan: Plan) -> float:
    return plan.estimate.step_s


def splits(job: Job, schedules: Sequence[str]) -> Iterator[Split]:
    """All that the rules of layouts admit for a job, without recomputation or offload."""
    shape, world = job.shape, job.cluster.ranks
    for tp in _divisors(world, shape.heads):
        if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
            continue
        for pp in _divisors(world // tp, shape.layers):
            for cp, kind in _contexts(job, world // (tp * pp), tp):
                dp = world // (tp * pp * cp)
                if job.batch % dp:
                    continue
                for base in _experts(job, Split(dp, tp, pp, cp, sequence=tp > 1, cp_kind=kind)):
                    yield from _scheduled(job, base, schedules)


def _contexts(job: Job, ranks: int, tp: int) -> Iterator[tuple[int, str]]:
    """Context parallelism pays where a rank's part of a sample stays long; its kinds differ with more than one rank."""
    shape = job.shape
    for cp in _divisors(ranks, max(1, job.seq // 512)):
        if job.seq % (2 * cp) and cp > 1:
            continue
        yield cp, "ring"
        if cp > 1:
            heads = tp * cp
            if shape.heads % heads == 0 and (shape.kv_heads % heads == 0 or heads % shape.kv_heads == 0):
                yield cp, "ulysses"
            yield cp, "gather"


def _experts(job: Job, base: Split) -> Iterator[Split]:
    if not job.shape.experts:
        yield base
        return
    ranks = base.dp * base.cp * base.tp
    for etp in {1, base.tp}:
        for ep in _divisors(ranks // etp, job.shape.experts):
            if job.shape.experts % ep == 0 and ranks % (ep * etp) == 0:
                yield base._replace(ep=ep, etp=etp)


def _scheduled(job: Job, base: Split, schedules: Sequence[str]) -> Iterator[Split]:
    local = job.batch // base.dp
    for samples in _POWERS:
        # Samples side by side on ranks that divide each of them: whole samples on each would move less.
        if local % samples or (samples > 1 and base.cp > 1):
            continue
        count = local // samples
        # ZeRO 1 moves no more than an all-reduce, and 2 no more than 1 where micro-batches do not add up.
        once = 2 if count == 1 and base.pp == 1 else 1
        for zero in (0,) if base.dp * base.cp == 1 else (once, 3) if base.pp == 1 else (once,):
            split = base._replace(samples=samples, micro_batches=count, zero=zero)
            if base.pp == 1:
                yield split
                continue
            for schedule in schedules:
                for chunks in _chunks(job, base.pp, schedule):
                    if clock.admitted(schedule, base.pp, count):
                        yield split._replace(schedule=schedule, chunks=chunks)


def _chunks(job: Job, pp: int, schedule: str) -> list[int]:
    kind = SCHEDULES[schedule]
    most = job.shape.layers // pp
    if not kind.any_chunks:
        return [kind.chunks] if kind.chunks <= most else []
    even = [v for v in range(2, most + 1) if job.shape.layers % (v * pp) == 0]
    # Where layers do not divide, stages of one layer less do.
    return even or [v for v in (2, 4, 8) if v <= most]


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
