"""One-dimensional tensor parallelism of a traced model, by the roles inferred for it.

What each matrix is divided into, :class:`~shoal.tensor.one_d.OneD` says, as for a model with a role table. But nothing
takes the place of the user's modules: the graph of their operators is what runs, with the uses of divided matrices
replaced and each rank's sizes written in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.comm.differentiable import joined, start_sum
from shoal.comm.world import Group
from shoal.errors import LayoutError, setting
from shoal.mesh import Coords, Mesh
from shoal.model.roles import REPLICATED, Role
from shoal.placement import Piece, Placement, Rule, Span
from shoal.tensor.linear import divided_linear
from shoal.tensor.one_d import AXIS, OneD
from shoal.tensor.ports import PURPOSE, Ports, left
from shoal.tensor.vocabulary import Vocabulary
from shoal.trace.capture import aten, where
from shoal.trace.infer import Inferred, refusal
from shoal.trace.localise import cuts, localise, ranks_of_atoms
from shoal.trace.rules import argument, name_of
from shoal.trace.sections import Section
from shoal.trace.spread import Site, owner


class InferredOneD:
    """The interpreter of inferred roles for ``size`` ranks on the mesh axis ``tp``.

    Raises :class:`LayoutError` where no matrix can be divided, where heads do not divide over the ranks, and where
    ranks would draw different random numbers; each time with the operator or the module.
    """

    loss_axes: tuple[str, ...] = ()

    def __init__(self, size: int, inferred: Inferred) -> None:
        self.size, self.inferred, self._one_d = size, inferred, OneD(size)
        self._check()
        ranks = ranks_of_atoms(inferred.spread, [self._ranks(site) for site in inferred.spread.sites], size)
        self._cuts = cuts(inferred.spread, ranks, size)

    def place(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        """Where the ``parameter`` of ``module``, of full ``shape``, lies."""
        turned = role.transposed and len(shape) == 2
        rule = self._one_d.place(role, module, parameter, shape[::-1] if turned else shape)
        if not turned and not role.fused:
            return rule

        def at(coords: Coords) -> Placement | None:
            placement = rule.place(coords)
            assert placement is not None
            if role.fused:
                placement = _of_one(placement, [rows for _, rows in role.parts])
            return _turned(placement) if turned else placement

        return Rule(at, rule.axes)

    def adapt(self, role: Role, module: nn.Module, mesh: Mesh) -> nn.Module:
        """``module`` itself: of a layer, the uses of divided matrices are replaced, and its sizes."""
        if isinstance(module, Section):
            part, group = module.part, mesh.over(AXIS)
            localise(part, self._cuts, mesh.coords[AXIS])
            for node, source in self.inferred.spread.crossings:
                if node in part.inside:
                    part.enter_by(node, source, _Into(group))
            for site in self.inferred.spread.sites:
                if site.node in part.inside:
                    part.call(site.node, self._use(site, mesh), (site.x, site.weight, site.bias))
        return module

    def localise(self, ctx: Any, coords: Coords) -> Any:
        return ctx

    def see(self, ctx: Any) -> None:
        pass

    def _use(self, site: Site, mesh: Mesh) -> nn.Module:
        """What computes with this rank's part of a matrix, of its input, weight and bias."""
        shape = site.weight.meta["val"].shape
        rows, columns = shape[::-1] if site.transposed else shape
        if site.kind == "embed":
            return _Embedding(Vocabulary(rows, mesh.over(AXIS)), self._one_d.first(columns, mesh))
        if site.kind == "row":
            return _Linear(self._one_d.second(columns, mesh), site.transposed, 1)
        parts = max(1, len(self._role(site).parts))
        linear = _Linear(self._one_d.first(columns, mesh), site.transposed, parts)
        return _Head(linear, Vocabulary(rows, mesh.over(AXIS))) if site.kind == "head" else linear

    def _role(self, site: Site) -> Role:
        return self.inferred.roles.get(owner(self.inferred.spread.captured.parameters[site.weight]), REPLICATED)

    def _ranks(self, site: Site) -> Tensor:
        """The rank of each feature that a matrix is divided by, int64; nothing for one that makes no atoms."""
        if len(site.atoms) == 0:
            return site.atoms
        module, _, parameter = self.inferred.spread.captured.parameters[site.weight].rpartition(".")
        shape = tuple(site.weight.meta["val"].shape)
        rule = self.place(self._role(site), module, parameter, shape)
        dim = int((site.kind == "row") != site.transposed)
        found = torch.full((shape[dim],), -1)
        for rank in range(self.size):
            placement = rule.at({AXIS: rank})
            assert placement is not None
            for piece in placement.pieces:
                start, stop = piece.box[dim]
                found[start:stop] = rank
        assert bool((found >= 0).all()), f"{module}.{parameter} has features that no rank holds"
        return found

    def _check(self) -> None:
        spread, size = self.inferred.spread, self.size
        if not spread.sites:
            problem = f"{type(spread.captured.module).__name__} cannot be divided: {refusal(self.inferred)}"
            raise LayoutError(setting("layout.tp", size, problem, "use dp, zero or pp"))
        for node in spread.captured.graph.nodes:
            if _draws(node):
                problem = f"ranks would draw different numbers for {where(node)}"
                raise LayoutError(setting("layout.tp", size, problem, "set its rate to 0, or use dp, zero or pp"))
        for site in spread.sites:
            role, name = self._role(site), owner(spread.captured.parameters[site.weight])
            rows = site.weight.meta["val"].shape[1 if site.transposed else 0]
            have = self.inferred.granules.get(name, rows)
            even = bool(role.heads)
            if have < size or (even and have % size):
                what = "heads" if even else "rows"
                legal = max(n for n in range(1, min(size, have) + 1) if not even or have % n == 0)
                problem = (
                    f"{name} has {have} {'groups of ' if even else ''}{what}, which do not divide over {size} ranks"
                )
                raise LayoutError(setting("layout.tp", size, problem, f"use tp={legal}"))
            if site.transposed and len({rows for _, rows in role.parts}) > 1:
                problem = f"the parts of {name}, a transposed matrix, are of different widths"
                raise LayoutError(setting("layout.tp", size, problem, "use dp, zero or pp"))


def _draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers in training."""
    if node.target is aten.dropout.default:
        return bool(node.args[1])
    if name_of(node) == "scaled_dot_product_attention":
        return bool(argument(node, 4, "dropout_p", 0.0))
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _of_one(placement: Placement, parts: Sequence[int]) -> Placement:
    """The pieces of several tensors that lie one after another as those of one, which has the ``parts``' rows."""
    pieces, start = [], 0
    for piece, rows in zip(placement.pieces, parts, strict=True):
        first: Span = (piece.box[0][0] + start, piece.box[0][1] + start)
        pieces.append(Piece(piece.name, (sum(parts), *piece.shape[1:]), (first, *piece.box[1:]), piece.at))
        start += rows
    return replace(placement, pieces=tuple(pieces))


def _turned(placement: Placement) -> Placement:
    """The placement of a transposed matrix: pieces of columns lie under each other, as pieces must be rows."""
    pieces, end = [], 0
    for piece in placement.pieces:
        rows, columns = piece.box[1], piece.box[0]
        height, width = rows[1] - rows[0], columns[1] - columns[0]
        place = ((end, end + height), (0, width))
        pieces.append(Piece(piece.name, piece.shape[::-1], (rows, columns), place))
        end += height
    return replace(placement, shape=(end, pieces[0].at[1][1]), pieces=tuple(pieces))


class _Linear(nn.Module):
    """A divided matrix times a block of its input."""

    def __init__(self, ports: Ports, transposed: bool, parts: int) -> None:
        super().__init__()
        self.ports, self.transposed, self.parts = ports, transposed, parts

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.transposed:  # pieces of columns under each other: [parts·in, out/parts]
            weight = weight.unflatten(0, (self.parts, -1)).transpose(1, 2).flatten(0, 1)
        return divided_linear(x, weight, bias, self.ports)


class _Head(nn.Module):
    """All logits on every rank, of rows of the vocabulary on each."""

    def __init__(self, linear: _Linear, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.linear, self.vocabulary = linear, vocabulary

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = self.linear(x, weight, bias)
        return joined(logits, -1, self.vocabulary.rows, self.vocabulary.group, PURPOSE)


class _Embedding(nn.Module):
    """Rows of a table on each rank."""

    def __init__(self, vocabulary: Vocabulary, ports: Ports) -> None:
        super().__init__()
        self.vocabulary, self.ports = vocabulary, ports

    def forward(self, tokens: Tensor, weight: Tensor, bias: None) -> Tensor:
        row, mine = self.vocabulary.find(tokens, weight)
        return left(F.embedding(row, weight).masked_fill(~mine[..., None], 0.0), self.ports.x)


class _Into(nn.Module):
    """What every rank has, where it meets what is divided: ranks have terms of its gradient, which are added up."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Summed.apply(x, self.group)  # type: ignore[no-untyped-call]
        return found


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.clone(memory_format=torch.contiguous_format)  # others may hold it too
        return start_sum(own, ctx.group, PURPOSE).wait(), None
