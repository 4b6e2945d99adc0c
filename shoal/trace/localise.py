"""One rank's sizes in the graph of a divided model.

A user's code writes the number of heads where it reshapes, and the width of a part where it splits. On a rank with some
of the heads both are smaller: every such number of the graph is replaced by that of the rank, found by counting its
atoms. A tensor must be divided along one dim alone, else its parts would not be a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shoal.errors import LayoutError, setting
from shoal.trace.capture import aten, given, where
from shoal.trace.labels import Value
from shoal.trace.rules import argument, name_of
from shoal.trace.sections import Part
from shoal.trace.spread import Spread

_SIZED = {"view", "reshape", "_unsafe_view", "expand"}


@dataclass(frozen=True)
class Cut:
    """How one dim of a divided tensor lies: of a factor of it the rank of each place, int64 [n]."""

    dim: int
    ranks: Tensor

    def local(self, rank: int, start: int = 0, stop: int | None = None) -> int:
        """How much of start … stop is on a rank."""
        return int((self.ranks[start:stop] == rank).sum())


def cuts(spread: Spread, rank_of: Tensor, ranks: int) -> dict[fx.Node, Cut | list[Cut]]:
    """How every divided tensor lies, where each atom is on the rank ``rank_of`` [atoms]. Raises :class:`LayoutError`
    where that is no tensor on each of the ``ranks``."""
    found: dict[fx.Node, Cut | list[Cut]] = {}
    for node, value in spread.values.items():
        if isinstance(value, Value):
            found[node] = _cut(node, value, rank_of, ranks)
        elif value is not None:
            found[node] = [_cut(node, one, rank_of, ranks) for one in value]
    return found


def _cut(node: fx.Node, value: Value, rank_of: Tensor, ranks: int) -> Cut:
    at = rank_of[value.labels]
    varies = [axis for axis in range(at.ndim) if bool((at != at.narrow(axis, 0, 1)).any())]
    if len(varies) == 1:
        axis = varies[0]
        along = at.movedim(axis, 0).flatten(1)[:, 0]
        if len(along.unique()) == ranks:
            dim = next(dim for dim in range(len(value.dims)) if axis in value.axes(dim))
            return Cut(dim, along)
    problem = f"what {where(node)} makes does not divide over as many ranks"
    raise LayoutError(setting("layout.tp", ranks, problem, "use fewer, or dp, zero or pp"))


def localise(part: Part, found: dict[fx.Node, Cut | list[Cut]], rank: int) -> None:
    """Replace the sizes in ``part`` by those of ``rank``."""
    for node, cut in found.items():
        if node not in part.inside:
            continue
        copy, name = part.copy_of[node], name_of(node)
        if name in _SIZED:
            assert isinstance(cut, Cut)
            _resize(part, copy, cut, rank)
        elif name == "unflatten":
            assert isinstance(cut, Cut)
            dim = given(node, 1) % len(given(node).meta["val"].shape)
            inner = list(given(copy, 2))
            if dim <= cut.dim < dim + len(inner) and inner[cut.dim - dim] != -1:
                inner[cut.dim - dim] = inner[cut.dim - dim] * cut.local(rank) // len(cut.ranks)
            copy.args = (copy.args[0], copy.args[1], inner)
        elif name in ("split", "split_with_sizes", "chunk"):
            source = found[given(node)]
            assert isinstance(source, Cut)
            assert isinstance(cut, list)
            dim = argument(node, 2, "dim", 0) % len(given(node).meta["val"].shape)
            if dim == source.dim:
                copy.target = aten.split_with_sizes.default
                copy.args, copy.kwargs = (copy.args[0], [one.local(rank) for one in cut], dim), {}
        elif name == "slice":
            source = found[given(node)]
            assert isinstance(source, Cut)
            dim, start, stop = (argument(node, at, "", default) for at, default in ((1, 0), (2, 0), (3, None)))
            if dim % len(given(node).meta["val"].shape) == source.dim:
                first, last, _ = slice(start, stop).indices(len(source.ranks))
                local = source.local(rank, 0, first), source.local(rank, 0, last)
                copy.args = (copy.args[0], source.dim, *local)


def _resize(part: Part, copy: fx.Node, cut: Cut, rank: int) -> None:
    sizes: list[Any] = list(given(copy, 1))
    n, local = len(cut.ranks), cut.local(rank)
    here = sizes[cut.dim]
    if isinstance(here, fx.Node):
        with part.graph.inserting_before(copy):
            apart = part.graph.call_function(operator.floordiv, (here, n))
            sizes[cut.dim] = part.graph.call_function(operator.mul, (apart, local))
    elif here != -1:
        sizes[cut.dim] = here * local // n
    copy.args = (copy.args[0], sizes)
    if name_of(copy) in ("view", "_unsafe_view"):  # a rank's part may lie otherwise in memory
        copy.target = aten.reshape.default


def ranks_of_atoms(spread: Spread, ranks_of_features: Sequence[Tensor], ranks: int) -> Tensor:
    """The rank of each atom, int64 [atoms], where the features of each matrix of the sites lie on the ranks given
    (empty for one that makes no atoms). Raises :class:`LayoutError` where what belongs together would be apart."""
    classes = spread.classes
    of_class = torch.full_like(classes, -1)
    for site, features in zip(spread.sites, ranks_of_features, strict=True):
        if len(site.atoms) == 0:
            continue
        mine = classes[site.atoms]
        order = torch.argsort(mine, stable=True)
        known = of_class[mine]
        if bool(((known >= 0) & (known != features)).any()):
            raise _apart(site.node, ranks)
        same = mine[order][1:] == mine[order][:-1]
        if bool((same & (features[order][1:] != features[order][:-1])).any()):
            raise _apart(site.node, ranks)
        of_class[mine] = features
    return of_class[classes]


def _apart(node: fx.Node, ranks: int) -> LayoutError:
    problem = f"heads or columns that {where(node)} needs in one place would be on several ranks"
    return LayoutError(setting("layout.tp", ranks, problem, "use fewer, or dp, zero or pp"))
