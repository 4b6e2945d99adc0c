"""Which elements of a tensor must lie on the same rank.

Every output feature of a linear map that reads the stream is an *atom*. What is made from atoms carries them along: a
tensor has, for each place along its divided dims, the atom that it belongs to. An operator that needs two atoms in one
place (a sum over a dim, a product of two tensors) joins them. What is never joined may lie on different ranks: those
classes of atoms are what tensor parallelism can divide, whatever the user's code calls them.

A dim is a product of *factors*, so that a reshape only regroups them: [B, T, 3·N·D] as [B, T, 3, N, D], or samples and
heads as one dim. Sizes that depend on the input are symbols, and are never divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

Size = Any
"""An int, or a sympy expression of the input's sizes."""

WHOLE = 0
"""The atom of what every rank has."""


@dataclass(frozen=True)
class Value:
    """A divided tensor: the sizes of the factors of each of its dims (none for a dim of size 1), and the ``labels``
    int64, of one axis a factor, of length 1 where nothing depends on it: the atoms."""

    dims: tuple[tuple[Size, ...], ...]
    labels: Tensor

    def axes(self, dim: int) -> range:
        """The axes of the labels that belong to a dim."""
        start = sum(len(one) for one in self.dims[:dim])
        return range(start, start + len(self.dims[dim]))

    def labelled(self, dim: int) -> bool:
        return any(self.labels.shape[axis] > 1 for axis in self.axes(dim))


def size(n: Any) -> Size:
    """A size of a traced tensor, as an int or an expression."""
    if not isinstance(n, torch.SymInt):
        return int(n)
    found = n.node.expr
    return int(found) if found.is_Integer else found  # the module may have made a number of it


def dims_of(shape: Sequence[Any]) -> tuple[tuple[Size, ...], ...]:
    """The factors of the dims of a tensor of which no more is known."""
    return tuple(() if n == 1 else (n,) for n in map(size, shape))


def regrouped(value: Value, shape: Sequence[Any]) -> Value | None:
    """``value`` after a reshape to ``shape``: the same elements in the same order. None where a new dim has a part of
    one that cannot be told for all sizes of the input."""
    queue = [(n, length) for n, length in zip(_flat(value.dims), value.labels.shape, strict=True)]
    dims: list[list[Size]] = []
    lengths: list[int] = []
    for want in map(size, shape):
        dims.append([])
        while want != 1:
            if not queue:
                return None
            n, length = queue.pop(0)
            if (rest := _divided(want, n)) is not None:
                taken, want = n, rest
            elif (rest := _divided(n, want)) is not None and (length == 1 or isinstance(want, int)):
                queue.insert(0, (rest, rest if length > 1 else 1))
                taken, want = want, 1
            else:
                return None
            dims[-1].append(taken)
            lengths.append(taken if length > 1 else 1)
    return None if queue else _merged(dims, value.labels.reshape(lengths))


def _merged(dims: Sequence[Sequence[Size]], labels: Tensor) -> Value:
    """Neighbouring factors of one dim that are numbers become one."""
    found: list[tuple[Size, ...]] = []
    full: list[int] = []
    lengths: list[int] = []
    axis = 0
    for dim in dims:
        found.append(())
        for whole, run in groupby(dim, key=lambda n: isinstance(n, int)):
            for part in [list(run)] if whole else [[n] for n in run]:
                some = any(length > 1 for length in labels.shape[axis : axis + len(part)])
                full += part if some else [1] * len(part)
                lengths.append(prod(part) if some else 1)
                found[-1] = (*found[-1], prod(part))
                axis += len(part)
    return Value(tuple(found), labels.expand(full).reshape(lengths))


def _flat(dims: Sequence[Sequence[Size]]) -> list[Size]:
    return [n for dim in dims for n in dim]


def permuted(value: Value, order: Sequence[int]) -> Value:
    """``value`` with its dims in another order."""
    axes = [axis for dim in order for axis in value.axes(dim)]
    return Value(tuple(value.dims[dim] for dim in order), value.labels.permute(axes))


def _divided(a: Size, b: Size) -> Size | None:
    """a/b where that is a whole number whatever the sizes of the input, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / b)
    if quotient.is_Integer:
        return int(quotient)
    numerator, denominator = quotient.as_numer_denom()
    return numerator if denominator == 1 and isinstance(b, sympy.Expr) else None


class Atoms:
    """All atoms, and which of them are joined, by which operator and why."""

    def __init__(self) -> None:
        self.count = 1
        self._edges: list[tuple[Tensor, Tensor, Any, bool]] = []
        self.stops: list[tuple[Any, Tensor]] = []
        """What needs the whole of a divided tensor, and the atoms of that."""

    def new(self, n: int) -> Tensor:
        """``n`` atoms that nobody has joined, int64 [n]."""
        self.count += n
        return torch.arange(self.count - n, self.count)

    def join(self, a: Tensor, b: Tensor, by: Any, *, within: bool = False) -> None:
        """Each of ``a`` with that of ``b``, which has its shape or can be made to. ``within`` one tensor, or of two."""
        a, b = (one.reshape(-1) for one in torch.broadcast_tensors(a, b))
        self._edges.append((a, b, by, within))

    def collapse(self, labels: Tensor, axis: int, by: Any) -> None:
        """All along an axis with each other."""
        if labels.shape[axis] > 1:
            self.join(labels, labels.narrow(axis, 0, 1), by, within=True)

    def stop(self, labels: Tensor, by: Any) -> None:
        """All of ``labels`` are needed whole."""
        self.stops.append((by, labels.reshape(-1)))

    def classes(self, *, within: bool = False, stops: bool = False) -> Tensor:
        """The class of each atom, int64 [count]: the least atom of it. Of joins ``within`` tensors alone, or all;
        with ``stops``, what is needed whole is in the class of :data:`WHOLE`."""
        edges = [(a, b) for a, b, _, inner in self._edges if inner or not within]
        if stops:
            edges += [(atoms, torch.full_like(atoms, WHOLE)) for _, atoms in self.stops]
        return self._components(edges)

    def culprit(self, atoms: Tensor) -> Any:
        """The operator by which all of ``atoms`` came to be one class, or that needs them whole: the first."""
        classes = self.classes()
        mine = set(classes[atoms].tolist())
        for by, stopped in self.stops:
            if mine & set(classes[stopped].tolist()):
                return by
        low, high = 0, len(self._edges)
        while low < high:
            middle = (low + high) // 2
            found = self._components([(a, b) for a, b, _, _ in self._edges[: middle + 1]])[atoms]
            low, high = (low, middle) if len(found.unique()) == 1 else (middle + 1, high)
        return self._edges[low][2] if low < len(self._edges) else None

    def _components(self, edges: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        parent = torch.arange(self.count)
        if not edges:
            return parent
        a, b = (torch.cat(side) for side in zip(*edges, strict=True))
        while True:
            least = torch.minimum(parent[a], parent[b])
            found = parent.clone()
            for side in (parent[a], parent[b], a, b):
                found.scatter_reduce_(0, side, least, "amin")
            found = found[found]
            if torch.equal(found, parent):
                return parent
            parent = found
