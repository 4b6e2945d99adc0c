"""What interpreters of tensor parallelism share: a weight's block at any place of a grid, and the modules for blocks.

Every kind divides the same things, over axes of its own. A block's *first* linears (query, key and value; gate and up;
the output matrix, and with it the embedding) have *columns*: heads, columns of the feed-forward, rows of the
vocabulary. Its *second* ones (out, down) read those columns and write to the residual *stream*. Of the stream samples,
positions and hidden features may each be divided; and of every weight the in-features, over ranks that have different
rows of the activations. *Latents* have neither columns nor a place in the stream: what makes them has all their rows on
every rank, and they enter whole into linears that have columns. :class:`Axes` says over which mesh axes, a subclass by
which ports linears put blocks together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import cast

import torch
from torch import nn

from shoal.comm.differentiable import pad, part_size
from shoal.layout.kinds import split_evenly
from shoal.mesh import Coords, Mesh
from shoal.model.context import Context
from shoal.model.loss import IGNORED
from shoal.model.roles import Role, logical_parts
from shoal.placement import Piece, Placement, Rule, Span
from shoal.tensor.linear import DividedLinear, Entry
from shoal.tensor.norms import divided_norm
from shoal.tensor.ports import Extent, Port, Ports, Still
from shoal.tensor.samples import Samples
from shoal.tensor.vocabulary import Vocabulary, VocabularyCrossEntropy, VocabularyEmbedding, VocabularyHead
from shoal.tensor.whole import Whole

FIRST = ("embed", "qkv", "gate_up", "head")
SECOND = ("out_proj", "down")
ALONG_THE_STREAM = ("norm", "position")


@dataclass(frozen=True)
class Axes:
    """Over which mesh axes a kind of tensor parallelism divides what; where several divide one dim, the outer first.

    ``columns``: heads, feed-forward columns, rows of the vocabulary. ``hidden``: features of the stream. ``samples``
    and ``positions`` of the stream; ``attended`` the samples where attention sees whole sequences, and the rows of
    logits. ``first`` and ``second``: in-features of the weights of either linear. ``repeated``: the stream is not
    divided, and every rank does the same with it.
    """

    columns: str
    hidden: str | None = None
    samples: tuple[str, ...] = ()
    attended: tuple[str, ...] = ()
    positions: str | None = None
    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    repeated: frozenset[str] = frozenset()


class OnGrid(ABC):
    """An interpreter for a grid whose ``sizes`` are those of its mesh axes.

    Heads divide evenly over the columns; key/value heads do, or the columns by them, and each is then on several ranks.
    The hidden size divides evenly. Feed-forward columns, the vocabulary and in-features may be uneven; samples and
    positions are padded.
    """

    def __init__(self, sizes: Mapping[str, int], axes: Axes) -> None:
        self.sizes, self.axes = dict(sizes), axes
        self.extent = Extent()
        self._matrices: dict[str, tuple[int, int]] = {}  # embedding and output matrix: vocabulary, hidden size

    @abstractmethod
    def first(self, in_features: int, mesh: Mesh) -> Ports:
        """The ports of a first linear, of a whole input of ``in_features``."""

    @abstractmethod
    def second(self, in_features: int, mesh: Mesh) -> Ports:
        """The ports of a second linear, of a whole input of ``in_features``."""

    def logits(self, hidden: int, mesh: Mesh) -> Ports:
        """The ports of the output matrix under the loss, which needs no samples whole: its rows are [1, rows, …]."""
        return self.first(hidden, mesh)

    def linear(self, linear: nn.Linear, ports: Ports, parts: tuple[int, ...], mesh: Mesh) -> nn.Module:
        """What computes with this rank's blocks of ``linear``."""
        return DividedLinear(linear, ports, parts)

    @abstractmethod
    def latents(self, mesh: Mesh) -> tuple[Port, Port]:
        """The port by which terms of latents, of this rank's hidden features, are added up where these are divided; and
        that by which latents enter, to be read by heads: whole, each with its gradient from all heads."""

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes on which ranks have the losses of different samples."""
        return self.axes.attended

    def place(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        """Where the ``parameter`` (its local name) of ``module``, of full ``shape``, lies."""
        if role.kind in ("embed", "head") and len(shape) == 2:
            self._matrices[role.kind] = shape[0], shape[1]  # all ranks see all, also what they do not hold
        axes = self.axes
        outer: str | None
        inner: tuple[str, ...] = ()
        if role.kind in FIRST:
            outer, inner = axes.columns, axes.first
        elif role.kind in ("expand", "heads_norm"):
            outer = axes.columns
        elif role.kind == "latent" and axes.hidden and len(shape) > 1:
            outer, inner = None, (axes.hidden,)
        elif role.kind in SECOND:
            outer, inner = axes.hidden, axes.second
        elif role.kind in ALONG_THE_STREAM and axes.hidden:
            outer, inner = (axes.hidden, ()) if len(shape) == 1 else (None, (axes.hidden,))
        else:
            return self._whole(role, module, parameter, shape)
        inner = inner if len(shape) > 1 else ()
        if outer is None and not inner:
            return self._whole(role, module, parameter, shape)
        name = f"{module}.{parameter}" if module else parameter
        parts = logical_parts(role, module, parameter) or ((name, shape[0]),)

        def at(coords: Coords) -> Placement:
            rows = self._rows(role, [total for _, total in parts], outer, coords)
            return _block(parts, rows, self._nested(shape[1], inner, coords) if inner else None, shape)

        return Rule(at, frozenset((outer, *inner)) - {None})  # type: ignore[arg-type]

    def adapt(self, role: Role, module: nn.Module, mesh: Mesh) -> nn.Module:
        """What takes the place of a ``module`` that has this rank's parameters: the same ones, under the same names."""
        if role.kind == "norm" and self.axes.hidden:
            return divided_norm(module, mesh.over(self.axes.hidden))
        if role.kind == "loss":
            size, hidden = self._matrices.get("head") or self._matrices["embed"]  # where they are one
            z_loss = getattr(module, "z_loss", 0.0)
            return VocabularyCrossEntropy(self.logits(hidden, mesh), self._vocabulary(size, mesh), z_loss)
        if role.kind == "embed":
            table = cast(nn.Embedding, module)
            ports, vocabulary = self.first(table.embedding_dim, mesh), self._vocabulary(table.num_embeddings, mesh)
            return VocabularyEmbedding(table, ports, vocabulary, self._streamed(mesh.coords))
        if role.kind == "heads_norm":
            # A head that several ranks have counts as often as any other.
            return divided_norm(module, mesh.over(self.axes.columns))
        if role.kind.startswith("latent"):
            return self._latent(role, module, mesh)
        if role.kind not in FIRST + SECOND:
            return module
        linear = cast(nn.Linear, module)
        if role.kind in SECOND:
            return self.linear(linear, self.second(linear.in_features, mesh), (), mesh)
        ports = self.first(linear.in_features, mesh)
        if role.kind == "head":
            vocabulary = self._vocabulary(linear.out_features, mesh)
            return VocabularyHead(linear, ports, vocabulary, mesh.over(*self.axes.attended), self.extent)
        totals = [total for _, total in role.parts]
        rows = self._rows(role, totals, self.axes.columns, mesh.coords) if totals else []
        return self.linear(linear, ports, tuple(stop - start for start, stop in rows), mesh)

    def see(self, ctx: Context) -> None:
        """A layer is about to run under ``ctx``."""
        self.extent.positions, self.extent.samples = ctx.held, ctx.samples
        self.extent.newest = ctx.newest is not None

    def localise(self, ctx: Context, coords: Coords) -> Context:
        """What of a micro-batch's context is this rank's. Attention sees whole sequences of some samples, and so their
        angles and their mask; the loss all positions of its samples; learned positions and dropout a block of the
        stream."""
        axes = self.axes
        attended, stream = self._attended(coords), self._streamed(coords)
        rope, mask, labels, positions, noise = ctx.rope, ctx.mask, ctx.labels, ctx.positions, ctx.noise
        newest, places, documents = ctx.newest, ctx.places, ctx.documents
        if attended.parts > 1:
            if places is not None and places.ndim > 1:  # of every sample some positions are here
                places = attended.of(places)[0] if stream.parts == attended.parts else stream.of(places)
            elif documents is not None:
                documents = attended.of_each(documents)
            rope = rope and (attended.of_each(rope[0]), attended.of_each(rope[1]))
            mask = None if mask is None else attended.of_each(mask)
            labels = None if labels is None else stream.of(labels, IGNORED)
            positions = None if positions is None else stream.of_each(positions)
            noise = noise and replace(noise, rows=stream.of(noise.rows))
        if axes.positions:
            size = part_size(ctx.held, self.sizes[axes.positions])
            first = coords[axes.positions] * size
            if places is None:
                known = positions if rope is None else rope[0]
                places = torch.arange(first, first + size, device=None if known is None else known.device)
            else:
                places = pad(places[..., first : first + size], -1, size, ctx.length)
            positions = None if positions is None else pad(positions[:, first : first + size], 1, size)
            noise = noise and noise.part(first, size)
            newest = None if newest is None else newest % size
        if axes.hidden:
            noise = noise and replace(noise, block=coords[axes.hidden])
        return replace(
            ctx, rope=rope, mask=mask, labels=labels, positions=positions, noise=noise, newest=newest,
            places=places, documents=documents,
        )  # fmt: skip

    def _whole(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        """All of it on every rank, which sees the same as the others unless it has rows or heads of its own."""
        placement = Whole().place(role, module, parameter, shape).at({})
        assert placement is not None
        if role.kind in ("latent", "latent_norm"):
            placement = replace(placement, duplicated=self._alike)
        elif role.kind != "head_norm":
            placement = replace(placement, duplicated=self.axes.repeated)
        return Rule(lambda _: placement)

    def _latent(self, role: Role, module: nn.Module, mesh: Mesh) -> nn.Module:
        terms, entry = self.latents(mesh)
        if role.kind == "latent":
            return DividedLinear(cast(nn.Linear, module), Ports(Still(), Still(), terms))
        return Entry(entry) if role.kind == "latent_entry" else module

    @property
    def _alike(self) -> frozenset[str]:
        """The axes on which ranks have the same latents: those of a stream that is repeated, and of hidden features
        where the sum over them is not divided by samples."""
        summed = {self.axes.hidden} - {None, *self.axes.attended}
        return self.axes.repeated | frozenset(axis for axis in summed if axis)

    def _vocabulary(self, size: int, mesh: Mesh) -> Vocabulary:
        return Vocabulary(size, mesh.over(self.axes.columns))

    def _attended(self, coords: Coords) -> Samples:
        return Samples.over([(name, self.sizes[name]) for name in self.axes.attended], coords)

    def _streamed(self, coords: Coords) -> Samples:
        """Blocks of the stream's samples are whole numbers of those that attention sees."""
        axes = [(name, self.sizes[name]) for name in self.axes.samples]
        further = [self.sizes[name] for name in self.axes.attended if name not in self.axes.samples]
        return Samples.over(axes, coords, prod(further))

    def _rows(self, role: Role, totals: Sequence[int], axis: str | None, coords: Coords) -> list[Span]:
        """What the rank at ``coords`` has of each of several ``totals``, rows of the parts of one matrix."""
        if axis is None:
            return [(0, total) for total in totals]
        size, at = self.sizes[axis], coords[axis]
        if axis != self.axes.columns or role.kind in SECOND or not role.heads:
            return [_share(total, size, at) for total in totals]
        assert role.heads % size == 0, f"{role.heads} heads over {size} ranks"
        # The first part has the query heads; a norm of key heads has those alone.
        width = totals[0] // (role.kv_heads if role.kind == "heads_norm" else role.heads)
        shares = [_share_of_heads(total // width, size, at) for total in totals]
        return [(start * width, stop * width) for start, stop in shares]

    def _nested(self, total: int, axes: Sequence[str], coords: Coords) -> Span:
        """The in-features of the rank at ``coords``: of its share on one axis its share on the next."""
        start, stop = 0, total
        for axis in axes:
            inner = _share(stop - start, self.sizes[axis], coords[axis])
            start, stop = start + inner[0], start + inner[1]
        return start, stop


def _share(total: int, size: int, at: int) -> Span:
    shares = split_evenly(total, size)
    return sum(shares[:at]), sum(shares[: at + 1])


def _share_of_heads(heads: int, size: int, at: int) -> Span:
    """The heads that rank ``at`` has: some of its own, or one that it shares with its neighbours."""
    assert heads % size == 0 or size % heads == 0, f"{heads} heads over {size} ranks"
    first = at * heads // size
    return first, max(first + 1, (at + 1) * heads // size)


def _block(
    parts: Sequence[tuple[str, int]], rows: Sequence[Span], columns: Span | None, shape: Sequence[int]
) -> Placement:
    """Several logical tensors (name, rows in all), of which a rank has some ``rows``, one after another, and of those
    some ``columns`` (all, unless told)."""
    box_rest = [(0, n) for n in shape[1:]] if columns is None else [columns]
    at_rest = [(0, stop - start) for start, stop in box_rest]
    pieces, end = [], 0
    for (name, total), (start, stop) in zip(parts, rows, strict=True):
        box, place = ((start, stop), *box_rest), ((end, end + stop - start), *at_rest)
        pieces.append(Piece(name, (total, *shape[1:]), box, place))
        end += stop - start
    return Placement((end, *(stop for _, stop in at_rest)), tuple(pieces))
