"""What a micro-batch takes in one layer of each kind, in the embedding and in the head, under a split."""

from __future__ import annotations

from shoal.plan.kernels import Kernels
from shoal.plan.network import Network
from shoal.plan.profile import Constants
from shoal.plan.shape import Layer, Matrix
from shoal.plan.terms import Passes, Terms
from shoal.plan.work import Job, Split


class LayerTimes:
    """Passes of layers of a job, which depend on tp, cp, ep, etp, samples of a micro-batch and recomputation alone."""

    def __init__(self, job: Job, constants: Constants) -> None:
        self.job, self.constants = job, constants
        self.kernels = Kernels(job.cluster.device, job.profile, constants, job.width)
        self.network = Network(job.cluster, constants)
        self._known: dict[tuple[object, ...], Passes] = {}

    def layer(self, layer: Layer, split: Split, recompute: str) -> Passes:
        """Of one layer; ``recompute`` is that of its stage."""
        key = (
            id(layer),
            split.tp,
            split.cp,
            split.ep,
            split.etp,
            split.samples,
            split.sequence,
            recompute,
            split.cp_kind,
        )
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._layer(layer, split, recompute)
        return known

    def _layer(self, layer: Layer, split: Split, recompute: str) -> Passes:
        job, kernels, profile = self.job, self.kernels, self.job.profile
        tokens = split.samples * job.seq // split.cp
        tp, width = split.tp, job.width
        dense = (*layer.attention, *layer.feed_forward)
        forward, inputs, weights = self._matrices(dense, tokens, tp)
        # Attention, and its backward pass.
        core = self._attention(layer, split)
        # Norms, residuals and dropout, which tensor parallelism divides only along the sequence; then what is between
        # the matrices, which it always does.
        outer = 24.0 * layer.hidden * tokens / (tp if split.sequence else 1) * width / 2
        heads = (layer.heads + layer.kv_heads) * layer.head_dim
        ffn = sum(m.outputs for m in layer.feed_forward if m.name == "up") * 1.5
        inner = (4.0 * heads + 2.0 * ffn) * tokens / tp * width / 2
        if job.eight_bit:
            inner += 5.0 * tokens * sum(m.inputs / (tp if m.cut == "rows" else 1) for m in dense)
        element = kernels.moved(outer + inner)
        # Gradients add up in memory.
        held = layer.dense / tp
        adding = kernels.moved(2.0 * profile.gradient_bytes * held, False)
        tensor = self._tensor(layer, split, tokens)
        context = self._context(layer, split, core)
        expert = self._experts(layer, split, tokens)
        number = 14 if profile.kernels != "torch" else 28
        launch = kernels.launches(number)
        one = Terms(forward, core, element, launch, tensor, context) + expert.forward
        back = (
            Terms(inputs, core * kernels.attention_backward, 1.7 * element, 1.5 * launch, tensor, context * 1.5)
            + expert.input_gradient
        )
        weight = Terms(weights, elementwise=adding) + expert.weight_gradient
        again = {
            "none": Terms(),
            "selective": Terms(attention=0.0 if kernels.attention_backward == 2.5 else core),
            "full": one,
        }[recompute]
        return Passes(one, back + again, weight)

    def _matrices(self, matrices: tuple[Matrix, ...], tokens: int, tp: int) -> tuple[float, float, float]:
        forward = inputs = weights = 0.0
        product, eight = self.kernels.matmul, self.job.bits
        for matrix in matrices:
            k = -(-matrix.inputs // tp) if matrix.cut == "rows" else matrix.inputs
            n = -(-matrix.outputs // tp) if matrix.cut == "columns" else matrix.outputs
            forward += product(tokens, k, n, eight)
            inputs += product(tokens, n, k, eight)
            weights += product(k, tokens, n, eight)
        return forward, inputs, weights

    def _attention(self, layer: Layer, split: Split) -> float:
        heads = max(1, layer.heads // split.tp)
        seen = self.job.seq
        causal = not 0 < layer.window < seen
        keys = min(seen, layer.window) if layer.window else seen
        queries = self.job.seq // split.cp
        return self.kernels.attention(split.samples, queries, keys, heads, layer.scores // split.tp, causal)

    def _tensor(self, layer: Layer, split: Split, tokens: int) -> float:
        """Two all-reduces a pass, or as many gathers and reduce-scatters: one after attention, one after a dense
        feed-forward."""
        if split.tp == 1:
            return 0.0
        group = self.network.group(split.tp, 1)
        amount = tokens * layer.hidden * self.job.width
        each = 2.0 * self.network.gather(amount, group) if split.sequence else self.network.all_reduce(amount, group)
        shown = self.constants["overlap.tensor"] if self.job.profile.hides_tensor and split.sequence else 1.0
        return each * shown * (1 if layer.experts and not layer.shared_ffn else 2)

    def _context(self, layer: Layer, split: Split, core: float) -> float:
        """Of a ring, what its hops take longer than the attention beside them; of heads exchanged, four exchanges."""
        if split.cp == 1:
            return 0.0
        group = self.network.group(split.cp, split.tp)
        local = split.samples * self.job.seq // split.cp * layer.head_dim * self.job.width / split.tp
        if split.cp_kind == "ulysses":
            return self.network.all_to_all(local * 2 * (layer.heads + layer.kv_heads), group)
        moved = self.network.gather(local * 2 * max(layer.kv_heads, split.tp) * split.cp, group)
        if split.cp_kind == "gather":
            return moved
        return max(0.0, moved - core) + self.constants["context.hop"] * 1e-6 * (split.cp - 1)

    def _experts(self, layer: Layer, split: Split, tokens: int) -> Passes:
        if not layer.experts:
            return Passes(Terms(), Terms(), Terms())
        job, kernels, constants = self.job, self.kernels, self.constants
        ep, etp = split.ep, split.etp
        local = -(-layer.experts // ep)
        # With experts folded into tensor parallelism, each of its ranks sends its own part of the tokens.
        mine = tokens / split.tp if split.sequence or split.tp > 1 else tokens
        arriving = mine * layer.topk * etp * (1.0 + constants["experts.imbalance"])
        rows = max(1, round(arriving / local))
        forward, inputs, weights = self._matrices(layer.expert, rows, etp)
        width = job.width
        sent = mine * layer.topk * layer.hidden * width
        group = self.network.group(ep, split.etp)
        copies = layer.topk if job.profile.hides_experts else 1
        exchange = 2.0 * self.network.all_to_all(sent, group, copies)
        if etp > 1:
            exchange += 2.0 * self.network.gather(arriving * layer.hidden * width, self.network.group(etp, 1))
        shown = constants["overlap.experts"] if job.profile.hides_experts else 1.0
        ffn = layer.expert[0].outputs * 1.5 / etp
        element = kernels.moved(arriving * (12.0 * layer.hidden + 2.0 * ffn) * width / 2)
        adding = kernels.moved(2.0 * job.profile.gradient_bytes * layer.routed / ep / etp, False)
        launch = kernels.launches(20)
        move = exchange * shown
        return Passes(
            Terms(forward * local, 0.0, element, launch, expert=move),
            Terms(inputs * local, 0.0, 1.7 * element, launch, expert=move),
            Terms(weights * local, elementwise=adding),
        )

    def embedding(self, split: Split) -> Passes:
        """Looking up rows, and adding their gradients."""
        job = self.job
        tokens = split.samples * job.seq // split.cp
        one = self.kernels.moved(4.0 * tokens * job.shape.hidden * job.width)
        amount = tokens * job.shape.hidden * job.width
        moved = self.network.all_reduce(amount, self.network.group(split.tp, 1)) if split.tp > 1 else 0.0
        held = job.shape.vocab * job.shape.hidden / split.tp
        return Passes(
            Terms(elementwise=one, tensor=moved),
            Terms(),
            Terms(elementwise=2 * one + self.kernels.moved(2.0 * job.profile.gradient_bytes * held, False)),
        )

    def head(self, split: Split) -> Passes:
        """The product with the vocabulary, always in 16 bits, and the loss over it, in 32."""
        job, kernels = self.job, self.kernels
        tokens = split.samples * job.seq // split.cp
        hidden, columns = job.shape.hidden, -(-job.shape.vocab // split.tp)
        loss = kernels.moved(self.constants["loss.bytes"] * tokens * columns)
        moved = 0.0
        if split.tp > 1:
            group = self.network.group(split.tp, 1)
            moved = self.network.all_reduce(tokens * hidden * job.width, group)
        adding = kernels.moved(2.0 * job.profile.gradient_bytes * hidden * columns, False)
        return Passes(
            Terms(kernels.matmul(tokens, hidden, columns), elementwise=loss, launch=kernels.launches(10)),
            Terms(kernels.matmul(tokens, columns, hidden), elementwise=loss, tensor=moved),
            Terms(kernels.matmul(hidden, tokens, columns), elementwise=adding),
        )
