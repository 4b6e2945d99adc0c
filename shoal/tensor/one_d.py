"""One-dimensional tensor parallelism (Megatron, Shoeybi et al. 2019), with or without sequence parallelism.

A block's first linears are divided by their outputs (attention heads, feed-forward columns), its second ones by the
inputs that come from those, so that each pair needs one sum over the ranks. The rows of the vocabulary are divided too.
What is left, norms and the biases of second linears, every rank has whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from torch import nn

from shoal.comm.differentiable import pad, part_size
from shoal.comm.world import Group
from shoal.layout.kinds import split_evenly
from shoal.mesh import Coords
from shoal.model.context import Context
from shoal.model.roles import Role, logical_parts
from shoal.placement import Piece, Placement, Rule, Span
from shoal.tensor.linear import ColumnLinear, RowLinear
from shoal.tensor.stream import Divided, FullSizes, Repeated, Stream
from shoal.tensor.vocabulary import VocabularyCrossEntropy, VocabularyEmbedding, VocabularyHead
from shoal.tensor.whole import Whole

AXIS = "tp"
BY_ROWS = ("embed", "qkv", "gate_up", "head")
BY_COLUMNS = ("out_proj", "down")


class OneD:
    """The interpreter for ``size`` ranks on the mesh axis ``tp``.

    Between a block's two parts activations are [B, T, H] on every rank; with ``sequence`` [B, ⌈T/P⌉, H], some positions
    on each. Heads divide evenly by ``size``; key/value heads do, or ``size`` by them, and each is then on several
    ranks. Feed-forward columns and rows of the vocabulary may be uneven.
    """

    def __init__(self, size: int, *, sequence: bool = False) -> None:
        self.size, self.sequence = size, sequence
        self._sizes = FullSizes()

    def place(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        """Where the ``parameter`` (its local name) of ``module``, of full ``shape``, lies."""
        by_columns = role.kind in BY_COLUMNS and len(shape) > 1
        if not (by_columns or role.kind in BY_ROWS):
            return self._whole(role, module, parameter, shape)
        dim = 1 if by_columns else 0
        whole = (f"{module}.{parameter}" if module else parameter, shape[dim])
        parts = logical_parts(role, module, parameter) or (whole,)

        def at(coords: Coords) -> Placement:
            spans = self._spans(role, [total for _, total in parts], coords[AXIS])
            return _cut(parts, spans, dim, shape)

        return Rule(at, frozenset({AXIS}))

    def adapt(self, role: Role, module: nn.Module, group: Group) -> nn.Module:
        """What takes the place of a ``module`` that has this rank's parameters: the same ones, under the same names."""
        sizes = self._sizes
        stream: Stream = Divided(group, sizes) if self.sequence else Repeated(group)
        if role.kind == "loss":
            return VocabularyCrossEntropy(stream, sizes, getattr(module, "z_loss", 0.0))
        if role.kind == "embed":
            table = cast(nn.Embedding, module)
            sizes.vocabulary = table.num_embeddings
            return VocabularyEmbedding(table, stream, sizes)
        if role.kind not in BY_ROWS + BY_COLUMNS:
            return module
        linear = cast(nn.Linear, module)
        if role.kind == "head":
            sizes.vocabulary = linear.out_features
            return VocabularyHead(linear, stream, sizes)
        if role.kind in BY_COLUMNS:
            return RowLinear(linear, stream)
        spans = self._spans(role, [rows for _, rows in role.parts], group.index)
        return ColumnLinear(linear, stream, tuple(stop - start for start, stop in spans))

    def localise(self, ctx: Context, group: Group) -> Context:
        """What of a micro-batch's context is this rank's: the learned positions and the dropout keys of its part of the
        stream. Attention sees all positions, and so their angles and their mask."""
        if not self.sequence:
            return ctx
        self._sizes.positions = ctx.length
        size = part_size(ctx.length, group.size)
        first = group.index * size
        positions = None if ctx.positions is None else pad(ctx.positions[:, first : first + size], 1, size)
        return replace(ctx, positions=positions, noise=ctx.noise and ctx.noise.part(first, size))

    def _whole(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        """All of it on every rank, which sees the same as the others unless it has positions or heads of its own."""
        placement = Whole().place(role, module, parameter, shape).at({})
        assert placement is not None
        if not (self.sequence or role.kind == "head_norm"):
            placement = replace(placement, duplicated=frozenset({AXIS}))
        return Rule(lambda _: placement)

    def _spans(self, role: Role, totals: Sequence[int], at: int) -> list[Span]:
        """What the rank at ``at`` has of each of several ``totals``, rows or columns of the parts of one matrix."""
        if not role.heads:
            return [_share(total, self.size, at) for total in totals]
        assert role.heads % self.size == 0, f"{role.heads} heads over {self.size} ranks"
        width = totals[0] // role.heads  # the first part has the query heads
        shares = [_share_of_heads(total // width, self.size, at) for total in totals]
        return [(start * width, stop * width) for start, stop in shares]


def _share(total: int, size: int, at: int) -> Span:
    shares = split_evenly(total, size)
    return sum(shares[:at]), sum(shares[: at + 1])


def _share_of_heads(heads: int, size: int, at: int) -> Span:
    """The heads that rank ``at`` has: some of its own, or one that it shares with its neighbours."""
    assert heads % size == 0 or size % heads == 0, f"{heads} heads over {size} ranks"
    first = at * heads // size
    return first, max(first + 1, (at + 1) * heads // size)


def _cut(parts: Sequence[tuple[str, int]], spans: Sequence[Span], dim: int, shape: Sequence[int]) -> Placement:
    """Several logical tensors (name, full size along ``dim``), of which a rank has ``spans``, one after another."""
    entire = [(0, n) for n in shape]
    pieces, end = [], 0
    for (name, total), (start, stop) in zip(parts, spans, strict=True):
        full, box, place = list(shape), list(entire), list(entire)
        full[dim], box[dim], place[dim] = total, (start, stop), (end, end + stop - start)
        pieces.append(Piece(name, tuple(full), tuple(box), tuple(place)))
        end += stop - start
    return Placement((*shape[:dim], end, *shape[dim + 1 :]), tuple(pieces))
