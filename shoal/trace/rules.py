"""What each operator does to divided tensors: where its result's elements lie, and which atoms it joins.

An operator that is not known here needs its inputs whole. So does one that is known, where what it would do cannot be
told for all sizes of the input: nothing is guessed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shoal.trace.capture import given, sizes_of
from shoal.trace.labels import Atoms, Size, Value, dims_of, permuted, regrouped

Found = Value | list[Value] | None
"""What a node makes: a divided tensor, several, or what every rank has whole."""
Values = dict[fx.Node, Found]

_ELEMENTWISE = {
    "to", "contiguous", "clone", "detach", "alias", "dropout", "type_as", "float", "gelu", "silu", "relu", "square",
}  # fmt: skip
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "_unsafe_view"}
_ALONG = {"softmax", "_softmax", "log_softmax", "_log_softmax"}
_REDUCTIONS = {"sum", "mean", "amax", "amin", "logsumexp", "var", "std", "linalg_vector_norm"}
ATTENTION = {"scaled_dot_product_attention", *_ALONG}
"""What is in attention and in no feed-forward."""


class Unknown(Exception):
    """What an operator does to a divided tensor cannot be told."""


def name_of(node: fx.Node) -> str:
    """``view`` of ``aten.view.default``, nothing for what is no operator of PyTorch."""
    return node.target._schema.name.rpartition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""


def result(node: fx.Node, values: Values, atoms: Atoms) -> Found:
    """What ``node``, some of whose inputs are divided, makes. Raises :class:`Unknown`."""
    if node.target is operator.getitem:
        many = values[given(node)]
        return many[given(node, 1)] if isinstance(many, list) else None
    name = name_of(node)
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    rule = _RULES.get(name)
    if rule is None and (pointwise or name in _ELEMENTWISE):
        rule = _pointwise
    if rule is None:
        raise Unknown
    return rule(node, values, atoms)


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument of an operator, however it was given."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _one(node: fx.Node, values: Values) -> Value:
    """The divided tensor that an operator of one tensor takes, which must be its first argument."""
    first = given(node)
    found = values.get(first) if isinstance(first, fx.Node) else None
    if not isinstance(found, Value):
        raise Unknown
    return found


def _pointwise(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    if name_of(node) in ("type_as", "to"):
        return _one(node, values)
    divided, whole = [], []
    for one in node.all_input_nodes:
        found = values.get(one)
        if isinstance(found, Value):
            divided.append(found)
        elif isinstance(one.meta["val"], Tensor):
            whole.append(sizes_of(one))
    return aligned(node, divided, whole, len(sizes_of(node)), atoms)


def aligned(node: fx.Node, divided: Sequence[Value], whole: Sequence[Sequence[Any]], ndim: int, atoms: Atoms) -> Value:
    """Tensors that meet element by element, some ``divided``, of others the shapes: each element is where those that
    make it are."""
    padded = [Value((((),) * (ndim - len(one.dims))) + one.dims, one.labels) for one in divided]
    dims: list[tuple[Size, ...]] = []
    for dim in range(ndim):
        kinds = {one.dims[dim] for one in padded if one.dims[dim]}
        if len(kinds) > 1:
            raise Unknown
        dims.append(kinds.pop() if kinds else ())
    labels = [_spread(one, dims) for one in padded]
    for shape in whole:
        for dim, n in enumerate(shape, start=ndim - len(shape)):
            if not (isinstance(n, int) and n == 1):
                for one in labels:
                    for axis in Value(tuple(dims), one).axes(dim):
                        atoms.collapse(one, axis, node)
    for axis in range(labels[0].ndim):
        if any(one.shape[axis] == 1 for one in labels):
            for one in labels:
                atoms.collapse(one, axis, node)
    for one in labels[1:]:
        atoms.join(labels[0], one, node)
    return Value(tuple(dims), torch.broadcast_tensors(*labels)[0])


def _spread(value: Value, dims: Sequence[tuple[Size, ...]]) -> Tensor:
    """The labels of ``value`` with an axis for each factor of ``dims``."""
    lengths: list[int] = []
    for dim, factors in enumerate(dims):
        own = [value.labels.shape[axis] for axis in value.axes(dim)]
        lengths += own or [1] * len(factors)
    return value.labels.reshape(lengths)


def _reshape(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    found = regrouped(_one(node, values), sizes_of(node))
    if found is None or any(isinstance(one, torch.dtype) for one in node.args):
        raise Unknown
    return found


def _squeeze(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    shape = sizes_of(given(node))
    every: tuple[Any, ...] = node.args[1:]
    dims = [dim for one in every for dim in ([one] if isinstance(one, int) else one)]
    if not dims or any(shape[dim] != 1 for dim in dims):
        raise Unknown  # a rank's part may be of size 1 where the whole is not
    return _reshape(node, values, atoms)


def _permute(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    value = _one(node, values)
    order = list(range(len(value.dims)))
    match name_of(node):
        case "transpose":
            a, b = given(node, 1), given(node, 2)
            order[a], order[b] = order[b], order[a]
        case "permute":
            order = [dim % len(order) for dim in given(node, 1)]
        case _:
            order.reverse()
    return permuted(value, order)


def _expand(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    value, shape = _one(node, values), sizes_of(node)
    missing = len(shape) - len(value.dims)
    dims, lengths = [], []
    for dim, want in enumerate(dims_of(shape)):
        own = value.dims[dim - missing] if dim >= missing else ()
        dims.append(own or want)
        lengths += [value.labels.shape[axis] for axis in value.axes(dim - missing)] if own else [1] * len(want)
    return Value(tuple(dims), value.labels.reshape(lengths))


def _part(value: Value, dim: int, n: Any, pick: Callable[[Tensor, int], Tensor]) -> Value:
    """Some of a dim, of size ``n``: ``pick`` takes them of the labels along an axis."""
    axes = value.axes(dim)
    dims = list(value.dims)
    if not value.labelled(dim):
        dims[dim] = dims_of((n,))[0]
        lengths = list(value.labels.shape)
        lengths[axes.start : axes.stop] = [1] * len(dims[dim])
        return Value(tuple(dims), value.labels.reshape(lengths))
    if len(axes) > 1:
        raise Unknown
    labels = pick(value.labels, axes.start)
    dims[dim] = dims_of((n,))[0]
    return Value(tuple(dims), labels if dims[dim] else labels.squeeze(axes.start))


def _slice(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    value = _one(node, values)
    dim, start, stop, step = (
        argument(node, place, "", default) for place, default in ((1, 0), (2, 0), (3, None), (4, 1))
    )
    dim %= len(value.dims)
    if value.labelled(dim) and not (isinstance(start, int | None) and isinstance(stop, int | None) and step == 1):
        raise Unknown
    return _part(
        value, dim, sizes_of(node)[dim], lambda labels, axis: labels[(slice(None),) * axis + (slice(start, stop),)]
    )


def _select(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    value, dim, place = _one(node, values), given(node, 1), given(node, 2)
    found = _part(
        value, dim % len(value.dims), 1, lambda labels, axis: labels.narrow(axis, place % labels.shape[axis], 1)
    )
    return Value(found.dims[: dim % len(value.dims)] + found.dims[dim % len(value.dims) + 1 :], found.labels)


def _split(node: fx.Node, values: Values, atoms: Atoms) -> list[Value]:
    value, unbinds = _one(node, values), name_of(node) == "unbind"
    dim = argument(node, 1 if unbinds else 2, "dim", 0) % len(value.dims)
    found, start = [], 0
    for one in node.meta["val"]:
        n = 1 if unbinds else one.shape[dim]
        if value.labelled(dim) and not isinstance(n, int):
            raise Unknown
        part = _part(value, dim, n, partial(torch.narrow, start=start, length=n))
        found.append(Value(part.dims[:dim] + part.dims[dim + 1 :], part.labels) if unbinds else part)
        start += n
    return found


def _cat(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    parts = [values.get(one) for one in given(node)]
    shape = sizes_of(node)
    dim = argument(node, 1, "dim", 0) % len(shape)
    found = [one for one in parts if isinstance(one, Value)]
    others = {one.dims[:dim] + one.dims[dim + 1 :] for one in found}
    if len(found) < len(parts) or len(others) > 1:
        raise Unknown
    along = any(one.labelled(dim) for one in found)
    if along and not all(isinstance(n, int) for one in given(node) for n in [sizes_of(one)[dim]]):
        raise Unknown
    pieces = []
    for one, source in zip(found, given(node), strict=True):
        axes, lengths = one.axes(dim), list(one.labels.shape)
        if len(axes) > 1 and along:
            raise Unknown
        lengths[axes.start : axes.stop] = [one.labels.shape[axes.start] if along and axes else 1]
        piece = one.labels.reshape(lengths)
        if along and piece.shape[axes.start] == 1:
            piece = piece.expand(*lengths[: axes.start], sizes_of(source)[dim], *lengths[axes.start + 1 :])
        pieces.append(piece)
    at = found[0].axes(dim).start
    for axis in range(pieces[0].ndim):
        if axis != at and len({one.shape[axis] for one in pieces}) > 1:
            raise Unknown
    if not along:
        for piece in pieces[1:]:
            atoms.join(pieces[0], piece, node)
    dims = list(found[0].dims)
    dims[dim] = dims_of((shape[dim],))[0]
    labels = torch.cat(pieces, at) if along else pieces[0]
    return Value(tuple(dims), labels)


def _collapsed(value: Value, dims: Sequence[int], node: fx.Node, atoms: Atoms) -> Value:
    """``value`` without ``dims``, along which it is added up: each of size 1."""
    kept = list(value.dims)
    labels = value.labels
    for dim in dims:
        for axis in value.axes(dim):
            atoms.collapse(value.labels, axis, node)
            labels = labels.narrow(axis, 0, 1)
        kept[dim] = ()
    lengths = [labels.shape[axis] for dim, factors in enumerate(kept) if factors for axis in value.axes(dim)]
    return Value(tuple(kept), labels.reshape(lengths))


def _along(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    value = _one(node, values)
    dims = [given(node, 1) % len(value.dims)]
    _collapsed(value, dims, node, atoms)
    return value


def _norm(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    value = _one(node, values)
    last = len(given(node, 1))
    _collapsed(value, range(len(value.dims) - last, len(value.dims)), node, atoms)
    return value


def _reduce(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    value, place = _one(node, values), 2 if name_of(node) == "linalg_vector_norm" else 1
    dims = argument(node, place, "dim")
    if dims is None or dims == []:
        raise Unknown
    every = [dim % len(value.dims) for dim in ([dims] if isinstance(dims, int) else dims)]
    found = _collapsed(value, every, node, atoms)
    if len(sizes_of(node)) == len(value.dims):
        return found
    return Value(tuple(one for dim, one in enumerate(found.dims) if dim not in every), found.labels)


def _matmul(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    a, b = given(node), given(node, 1)
    shapes = [sizes_of(one) for one in (a, b)]
    if any(len(shape) < 2 for shape in shapes):
        raise Unknown
    divided, whole = [], []
    for one, shape, summed in zip((a, b), shapes, (-1, -2), strict=True):
        if isinstance(found := values.get(one), Value):
            divided.append(_collapsed(found, [len(shape) + summed], node, atoms))
        else:
            whole.append([*shape[:-2], *((1, shape[-1]) if summed == -2 else (shape[-2], 1))])
    return aligned(node, divided, whole, len(sizes_of(node)), atoms)


def _attention(node: fx.Node, values: Values, atoms: Atoms) -> Value:
    q, k, v, mask = (argument(node, place, name) for place, name in enumerate(("query", "key", "value", "attn_mask")))
    shape, divided, whole = sizes_of(node), [], []
    for one in (q, k, v):
        own = sizes_of(one)
        repeats = 1
        if node.kwargs.get("enable_gqa") and own[-3] != shape[-3]:
            repeats = shape[-3] // own[-3]
        if not isinstance(found := values.get(one), Value):
            whole.append([*own[:-3], shape[-3], 1, 1] if len(own) > 2 else [1, 1])
            continue
        found = _collapsed(found, [len(own) - 2, len(own) - 1], node, atoms)
        if repeats > 1:
            heads = len(own) - 3
            axes, dims = found.axes(heads), list(found.dims)
            if len(axes) != 1:
                raise Unknown
            labels = found.labels
            labels = labels.repeat_interleave(repeats, axes.start) if labels.shape[axes.start] > 1 else labels
            dims[heads] = dims_of((shape[-3],))[0]
            found = Value(tuple(dims), labels)
        divided.append(found)
    if mask is not None:
        if values.get(mask) is not None:
            raise Unknown
        whole.append([*sizes_of(mask)[:-2], 1, 1])
    found = aligned(node, divided, whole, len(shape), atoms)
    last = dims_of(shape[-2:])
    return Value(found.dims[:-2] + last, found.labels.reshape(*found.labels.shape, *[1] * sum(map(len, last))))


_RULES: dict[str, Callable[[fx.Node, Values, Atoms], Found]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(("transpose", "permute", "t", "numpy_T"), _permute),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _split),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "cat": _cat,
    "scaled_dot_product_attention": _attention,
}
