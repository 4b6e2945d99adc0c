"""What a rank holds at its fullest moment: model states, activations in flight, logits, buffers.

States follow ZeRO (Rajbhandari et al. 2020, 1910.02054), activations of a layer Korthikanti et al. (2022, 2205.05198)
where kernels are not fused, and how many micro-batches are in flight comes from the Program of the schedule. Bytes
throughout.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.plan import clock
from shoal.plan.shape import Layer
from shoal.plan.work import Cuts, Job, Split

GIB = 2**30
MARGIN = 0.06
"""Of a device's memory, what a plan leaves free: for what the allocator cannot use."""


class Held(NamedTuple):
    """Bytes of one rank, at its fullest moment."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    """Communication, gathered parameters, and what there is before the model."""

    @property
    def total(self) -> float:
        return sum(self)


class States(NamedTuple):
    """Bytes of model states of one rank."""

    parameters: float
    gradients: float
    optimizer: float


def states(
    held: float, zero: int, ranks: int, width: float = 2, gradient: float = 2, state: float = 12, offload: float = 0.0
) -> States:
    """Those of ``held`` parameters, which ZeRO stage ``zero`` divides over ``ranks``: mixed-precision Adam unless told
    otherwise."""
    of = [ranks if zero >= stage else 1 for stage in (3, 2, 1)]
    return States(width * held / of[0], gradient * held / of[1], state * held / of[2] * (1 - offload))


class Saved(NamedTuple):
    """Bytes that a layer keeps of a token for its backward pass."""

    outer: float
    """What tensor parallelism divides only along the sequence."""
    inner: float
    """What it always divides."""
    scores: float
    """For each position that attention sees; divided, too."""
    experts: float
    """For each token that arrives at a rank's experts."""


def saved(
    layer: Layer,
    width: int = 2,
    *,
    fused: bool = True,
    dropout: bool = False,
    eager: bool = False,
    copies: float = 1.0,
    score: int = 0,
) -> Saved:
    """What a layer keeps without recomputation.

    The inputs of its norms and of what follows them, masks of dropout, queries, keys, values, attention's output, and
    of the feed-forward the inputs of its activation and of the second matrix, ``copies`` times. Attention that is not
    ``fused`` keeps ``score`` bytes of a score: unless told, those of the softmax and of dropout. ``eager`` norms keep
    what they make in float32.
    """
    h = layer.hidden
    outer = 4.0 * width * h + (2.0 * h if dropout else 0.0) + (12.0 * h if eager else 0.0)
    channels = (2 * layer.heads + 2 * layer.kv_heads) * layer.head_dim
    if layer.latent:
        latent = layer.latent
        outer += width * (latent.query_rank + latent.key_value_rank)
        channels = layer.heads * (4 * layer.head_dim + 2 * latent.rotary)
    parts = 3 if layer.gated else 2
    ffn = layer.shared_ffn if layer.experts else layer.ffn
    inner = copies * width * (channels + parts * ffn) + (4.0 * layer.heads if fused else 0.0)
    if eager:
        inner += width * (layer.heads + layer.kv_heads) * layer.head_dim / 2
    each = score or width + (1 + width if dropout else 0)
    experts = width * (2.0 * h + parts * layer.expert_ffn) if layer.experts else 0.0
    return Saved(outer, inner, 0.0 if fused else float(each * layer.heads), experts)


class Memory:
    """How much ranks hold of one job under many splits."""

    def __init__(self, job: Job) -> None:
        self.job = job
        profile = job.profile
        self._fused = profile.attention not in ("unfused", "fused-softmax")
        self._saved = {
            id(layer): saved(
                layer,
                job.width,
                fused=self._fused,
                dropout=not layer.gated,
                eager=profile.kernels == "eager",
                copies=profile.kept_copies,
                score=profile.score_bytes,
            )
            for _, layer in job.shape.blocks
        }
        self._cuts = Cuts(job.shape)
        self._kinds = [layer for _, layer in job.shape.blocks]

    @property
    def keeps_scores(self) -> bool:
        """Whether attention keeps its scores, which selective recomputation gives up."""
        return not self._fused

    @property
    def room(self) -> float:
        """What a device offers to a plan: its memory, less the margin, in bytes."""
        return self.job.cluster.device.memory_gib * GIB * (1 - MARGIN)

    def layer(self, layer: Layer, split: Split, recompute: str) -> float:
        """What a micro-batch leaves in a layer for its backward pass."""
        job = self.job
        tokens = split.samples * job.seq / split.cp
        along = split.tp if split.sequence else 1
        if recompute == "full":
            return job.width * layer.hidden * tokens / along
        one = self._saved[id(layer)]
        total = tokens * (one.outer / along + one.inner / split.tp)
        if recompute == "none":
            total += tokens * one.scores * job.seq / split.tp
        if layer.experts:
            # Experts of all ranks get as many tokens altogether as there are choices of one.
            total += tokens * layer.topk * one.experts / split.tp * 1.1
        return total

    def parameters(self, split: Split) -> list[tuple[float, float]]:
        """By rank of the pipeline: parameters outside the experts, and in them."""
        shape = self.job.shape
        home = clock.home(split.schedule, split.pp, split.chunks)
        dense, routed = [0.0] * split.pp, [0.0] * split.pp
        for rank, cut in zip(home, self._cuts.of(split), strict=True):
            for layer, count in cut.kinds:
                dense[rank] += count * layer.dense / split.tp
                routed[rank] += count * layer.routed / (split.ep * split.etp)
        vocabulary = shape.vocab * shape.hidden / split.tp
        dense[home[0]] += vocabulary + shape.learned_positions * shape.hidden
        if not shape.tied or home[-1] != home[0]:
            dense[home[-1]] += vocabulary
        return list(zip(dense, routed, strict=True))

    def ranks(self, split: Split) -> list[Held]:
        """By rank of the pipeline."""
        order = clock.flight(split.schedule, split.pp, split.micro_batches, split.chunks)
        cuts = self._cuts.of(split)
        modes = {mode: self._micro_batch(split, mode) for mode in {split.recompute, "none"}}
        found = []
        for rank, (dense, routed) in enumerate(self.parameters(split)):
            mode = split.recompute if split.recomputing < 0 or rank < split.recomputing else "none"
            each = modes[mode]
            mine = [stage for stage, home in enumerate(order.home) if home == rank]
            flight = sum(
                number * count * each[id(layer)]
                for stage, number in zip(mine, order.held[rank], strict=True)
                for layer, count in cuts[stage].kinds
            )
            if mode == "full":
                flight += max(modes["none"].values())
            logits, buffers = self._beside(split, order.home[-1] == rank)
            found.append(Held(*self._states(split, dense, routed), flight, logits, buffers))
        return found

    def _micro_batch(self, split: Split, mode: str) -> dict[int, float]:
        return {id(layer): self.layer(layer, split, mode) for layer in self._kinds}

    def _states(self, split: Split, dense: float, routed: float) -> States:
        """Experts are divided over fewer ranks: those that hold the same ones."""
        job, profile = self.job, self.job.profile
        width, state = job.width, profile.state_bytes - (4 if job.width == 4 else 0)
        zero = split.zero
        if split.pp > 1:
            # What several micro-batches add up to is whole until the last; a pipeline's parameters stay gathered.
            zero = min(zero, 1)
        elif zero == 2 and split.micro_batches > 1:
            zero = 1
        of = states(dense, zero, split.sharded, width, profile.gradient_bytes, state, split.offload)
        if not routed:
            return of
        same = max(1, split.dp * split.cp * split.tp // (split.ep * split.etp))
        shards = min(same, split.sharded)
        more = states(routed, zero, shards, width, profile.gradient_bytes, state, split.offload)
        return States(*(a + b for a, b in zip(of, more, strict=True)))

    def _beside(self, split: Split, last: bool) -> tuple[float, float]:
        """Logits, on the last rank, and buffers."""
        job, profile, shape = self.job, self.job.profile, self.job.shape
        tokens = split.samples * job.seq / split.cp
        logits = profile.logit_bytes * tokens * shape.vocab if last else 0.0
        if profile.splits_logits:
            logits /= split.tp
        buffers = profile.first_memory_gib * GIB
        if split.pp > 1:
            buffers += 4.0 * job.width * tokens * shape.hidden / (split.tp if split.sequence else 1)
        if split.zero == 3 and split.pp == 1:
            blocks = [layer.dense / split.tp + layer.routed / (split.ep * split.etp) for layer in self._kinds]
            largest = max(*blocks, shape.vocab * shape.hidden / split.tp)
            buffers += (2 * job.width + profile.gradient_bytes) * largest
        return logits, buffers

    def most(self, split: Split) -> Held:
        """The rank that holds most."""
        return max(self.ranks(split), key=lambda held: held.total)

    def least(self, split: Split) -> float:
        """No less than this is held, however much is recomputed and offloaded: parameters and gradients of the mean
        rank of the pipeline, and the buffers."""
        shape = self.job.shape
        dense = sum(count * layer.dense for count, layer in shape.blocks) + shape.vocab * shape.hidden
        routed = sum(count * layer.routed for count, layer in shape.blocks)
        mean = dense / split.tp / split.pp, routed / (split.ep * split.etp) / split.pp
        return sum(self._states(split._replace(offload=1.0), *mean)) + self.job.profile.first_memory_gib * GIB
