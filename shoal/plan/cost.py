"""What a step takes under a split, and what on: passes through the pipeline, the data-parallel collectives, the update.

The pipeline is timed by running the schedule's Program (:mod:`shoal.plan.clock`); reductions and gathers run beside
compute where the framework lets them, and slow it down by what they take of the device; the rest is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from shoal.plan import clock, crowded
from shoal.plan.layer_time import LayerTimes
from shoal.plan.profile import Constants
from shoal.plan.terms import Passes, Terms
from shoal.plan.work import Cuts, Job, Split

_PassesOf = tuple[str, int, int, int, list[tuple[float, ...]], float]
"""Schedule, ranks, micro-batches, chunks, costs by stage and transfer."""


@dataclass(frozen=True)
class Estimate:
    """A step: how long, and on what. The ``terms`` add up to ``step_s``."""

    step_s: float
    terms: Mapping[str, float]
    """Seconds: those of :class:`Terms` on the rank that has most to do, then ``bubble`` (what the pipeline waits),
    ``data`` (reductions and gathers that nothing hides), ``optimizer``, ``cores`` (waiting for one) and ``jitter``."""


class StepTimes:
    """Estimates for one job under many splits."""

    def __init__(self, job: Job, constants: Constants) -> None:
        self.job, self._constants = job, constants
        self.layers = LayerTimes(job, constants)
        self._network = self.layers.network
        self._cuts = Cuts(job.shape)
        self._works: dict[tuple[object, ...], float] = {}
        """Of a micro-batch on all ranks of the pipeline together, by what it depends on."""

    def stages(self, split: Split) -> list[Passes]:
        """By global stage, what a micro-batch takes."""
        home = clock.home(split.schedule, split.pp, split.chunks)
        known: dict[tuple[object, ...], Passes] = {}
        found = []
        for rank, cut in zip(home, self._cuts.of(split), strict=True):
            mode = split.recompute if split.recomputing < 0 or rank < split.recomputing else "none"
            key = (mode, cut.first, cut.last, *((id(layer), count) for layer, count in cut.kinds))
            if (total := known.get(key)) is None:
                total = Passes(Terms(), Terms(), Terms())
                for layer, count in cut.kinds:
                    one = self.layers.layer(layer, split, mode)
                    total = total.plus(Passes(*(part.times(count) for part in one)))
                if cut.first:
                    total = total.plus(self.layers.embedding(split))
                if cut.last:
                    total = total.plus(self.layers.head(split))
                known[key] = total
            found.append(total)
        return found

    def estimate(self, split: Split) -> Estimate:
        """The step under ``split``, which is legal for the job."""
        stages = self.stages(split)
        if split.zero == 3 and split.pp == 1:
            stages = [self._gathered(passes, split) for passes in stages]
        costs = [tuple(part.total for part in passes) for passes in stages]
        transfer = self._transfer(split)
        passes = split.schedule, split.pp, split.micro_batches, split.chunks, costs, transfer
        pipeline = clock.length(*passes)
        home = clock.home(split.schedule, split.pp, split.chunks)
        loads = [0.0] * split.pp
        for stage, rank in enumerate(home):
            loads[rank] += sum(costs[stage])
        busiest = loads.index(max(loads))
        mine = Passes(Terms(), Terms(), Terms())
        for stage, rank in enumerate(home):
            if rank == busiest:
                mine = mine.plus(stages[stage])
        work = mine.total.times(split.micro_batches)
        terms = dict(zip(Terms._fields, work, strict=True))
        terms["bubble"] = max(0.0, pipeline - work.total)
        terms["data"] = self._data(split, mine)
        terms["optimizer"] = self._update(split)
        terms["cores"] = self._crowd(split, passes, pipeline, terms["data"] + terms["optimizer"])
        spent = sum(terms.values())
        spread = self._spread(split)
        terms["jitter"] = spent * (spread - 1.0)
        return Estimate(spent * spread, terms)

    def _crowd(self, split: Split, passes: _PassesOf, alone: float, beside: float) -> float:
        """What ranks that share cores wait for one, over what they would take on cores of their own: ``alone`` in the
        passes, ``beside`` after them."""
        crowd = self.job.cluster.crowd
        if crowd == 1.0:
            return 0.0
        together = crowded.length(*passes, cores=split.pp / crowd)
        return max(0.0, together - alone) + (crowd - 1.0) * beside

    def bound(self, split: Split) -> float:
        """No step under ``split`` takes less: the mean work of a rank, and the pipeline filling up."""
        light = "none" if split.recomputing >= 0 else split.recompute
        key = split.tp, split.cp, split.ep, split.etp, split.samples, split.sequence, split.cp_kind, light
        if (work := self._works.get(key)) is None:
            work = self.layers.embedding(split).total.total + self.layers.head(split).total.total
            for count, layer in self.job.shape.blocks:
                work += count * self.layers.layer(layer, split, light).total.total
            self._works[key] = work
        mine = work / split.pp
        fill = mine * (split.pp - 1) / split.chunks if split.schedule in ("1f1b", "interleaved") else 0.0
        spread = self._spread(split)
        return (split.micro_batches * mine + fill + self._update(split)) * spread

    def _spread(self, split: Split) -> float:
        """What the framework's pace and waiting for the slowest of many add, as a factor."""
        constants = self._constants
        doublings = log2(max(1.0, split.ranks / 8))
        return constants[f"pace.{self.job.profile.name}"] * (1.0 + constants["jitter"] * doublings)

    def held(self, split: Split) -> float:
        """Parameters of the rank that has most."""
        shape = self.job.shape
        per_stage = shape.layers / split.pp
        layer = max((layer.dense / split.tp + layer.routed / (split.ep * split.etp)) for _, layer in shape.blocks)
        return per_stage * layer + shape.vocab * shape.hidden / split.tp * (1 if split.pp > 1 else 2)

    def _transfer(self, split: Split) -> float:
        if split.pp == 1:
            return 0.0
        job = self.job
        stride = split.tp * split.cp * split.dp
        amount = split.samples * job.seq // split.cp * job.shape.hidden * job.width / split.tp
        return self._network.send(amount, stride) * self._constants["pipeline.send"]

    def _gathered(self, passes: Passes, split: Split) -> Passes:
        """ZeRO-3: each pass gathers its layers' parameters while the layer before computes; gradients are reduced
        likewise."""
        job = self.job
        size = split.sharded
        group = self._network.group(size, split.tp)
        held = self.held(split) / split.chunks
        layers = max(1, job.shape.layers // (split.pp * split.chunks))
        each = self._network.gather(2.0 * held / layers, group) * layers
        reduce = self._network.gather(job.profile.reduce_bytes * held / layers, group) * layers
        spare = self._constants["overlap.slowdown"]

        def beside(part: Terms, moved: float) -> Terms:
            hidden = max(0.0, moved - part.total) + spare * min(moved, part.total)
            return part + Terms(gather=hidden)

        forward = beside(passes.forward, each)
        both = passes.input_gradient.total + passes.weight_gradient.total
        moved = reduce + each
        hidden = max(0.0, moved - both) + spare * min(moved, both)
        return Passes(forward, passes.input_gradient + Terms(gather=hidden), passes.weight_gradient)

    def _data(self, split: Split, mine: Passes) -> float:
        """Reducing gradients and gathering parameters, once a step, as far as they show."""
        job, constants = self.job, self._constants
        replicas = split.dp * split.cp
        if replicas == 1 or (split.zero == 3 and split.pp == 1):
            return 0.0
        profile = job.profile
        held = self.held(split)
        stride = split.tp
        whole = self._network.group(replicas, stride)
        if split.zero:
            reduce = self._network.gather(profile.reduce_bytes * held, whole)
            shards = self._network.group(split.sharded, stride)
            gather = self._network.gather(job.width * held, shards)
            if split.sharded < replicas:
                reduce = self._network.all_reduce(profile.reduce_bytes * held, whole)
        else:
            reduce, gather = self._network.all_reduce(profile.reduce_bytes * held, whole), 0.0
        if not profile.hides_data:
            return reduce + gather
        spare = constants["overlap.slowdown"]
        back = mine.input_gradient.total + mine.weight_gradient.total
        ahead = mine.forward.total
        first = max(0.0, reduce - 0.9 * back) + spare * min(reduce, back)
        return first + max(0.0, gather - 0.9 * ahead) + spare * min(gather, ahead)

    def _update(self, split: Split) -> float:
        """Reading and writing states, in the memory of the device or of the host."""
        job = self.job
        held = self.held(split)
        mine = held / split.sharded if split.zero else held
        moved = mine * (2.0 * job.profile.state_bytes + job.profile.gradient_bytes + 4.0)
        device = self.layers.kernels.moved(moved * (1 - split.offload), False) * self._constants["optimizer.passes"]
        host = split.offload * mine * 20.0 / (job.cluster.device.host_link * 1e9)
        return device + host + 2e-4
