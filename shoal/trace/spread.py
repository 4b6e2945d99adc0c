"""Following divided tensors through a graph, from the linear maps that make them to those that add them up.

A linear map that reads what every rank has makes atoms; one that reads atoms by its in-features ends them. Between the
two are only operators that :mod:`~shoal.trace.rules` knows. Where another needs the whole, the linear maps that made it
are not divided, and everything is followed again without them, until nothing changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

from shoal.trace.capture import Captured, aten, given, sizes_of
from shoal.trace.labels import WHOLE, Atoms, Value, dims_of
from shoal.trace.rules import Unknown, Values, result


@dataclass(frozen=True)
class Site:
    """One use of a matrix that may be divided, by the operator ``node``: ``weight`` and ``bias`` are placeholders.
    ``atoms`` are those of a column's outputs, or of a row's inputs."""

    node: fx.Node
    kind: Literal["column", "row", "head", "embed"]
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None
    transposed: bool = False
    atoms: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))


@dataclass
class Spread:
    """What is divided of a graph: the ``sites``, and ``values`` where divided tensors are. At ``crossings`` (operator,
    input) a tensor that every rank has meets divided ones, so that ranks have terms of its gradient. ``kept`` are the
    weights that stay whole, with the operator that needs it (None where that is the matrix's own form)."""

    captured: Captured
    atoms: Atoms
    values: Values
    sites: list[Site]
    crossings: list[tuple[fx.Node, fx.Node]]
    kept: dict[str, fx.Node | None]
    reached: set[fx.Node]
    """What depends on a parameter."""

    @cached_property
    def classes(self) -> Tensor:
        """The class of each atom, int64 [atoms], once all is followed."""
        return self.atoms.classes(stops=True)


def spread(captured: Captured, kept: Mapping[str, fx.Node | None] | None = None) -> Spread:
    """Divide what can be, but for the weights ``kept`` whole."""
    kept = {**dict.fromkeys(_not_alone(captured)), **(kept or {})}
    while True:
        found = _follow(captured, kept)
        more = _whole(found)
        if not more:
            return found
        kept.update(more)


def owner(name: str) -> str:
    """The module of a parameter."""
    return name.rpartition(".")[0]


def _not_alone(captured: Captured) -> set[str]:
    """The parameters of modules that have others than a matrix and its bias: no one role would do for them."""
    first: dict[nn.Parameter, str] = {one: name for name, one in captured.module.named_parameters()}
    found = set()
    for module in captured.module.modules():
        own = list(module.parameters(recurse=False))
        if [one.ndim for one in own].count(2) != 1 or len(own) > 2 or any(one.ndim > 2 for one in own):
            found |= {first[one] for one in own}
    return found


def _follow(captured: Captured, kept: Mapping[str, fx.Node | None]) -> Spread:
    found = Spread(captured, Atoms(), {}, [], [], dict(kept), set(captured.parameters))
    ends = _ends(captured)
    for node in captured.graph.nodes:
        if any(one in found.reached for one in node.all_input_nodes):
            found.reached.add(node)
        if node.op == "output":
            _need_whole(found, node)
        if node.op != "call_function":
            continue
        if (site := _site(node, captured)) is not None and _enter(found, site, ends):
            continue
        if any(found.values.get(one) is not None for one in node.all_input_nodes):
            try:
                made = result(node, found.values, found.atoms)
            except Unknown:
                _need_whole(found, node)
                continue
            found.values[node] = made
            if made is not None:
                found.crossings += [
                    (node, one)
                    for one in node.all_input_nodes
                    if found.values.get(one) is None and one in found.reached and isinstance(one.meta["val"], Tensor)
                ]
    return found


def _site(node: fx.Node, captured: Captured) -> Site | None:
    """The use of a matrix that ``node`` is."""
    parameters, arguments = captured.parameters, cast(tuple[Any, ...], node.args)
    if node.target is aten.linear.default:
        x, weight, *rest = arguments
        bias = rest[0] if rest else None
        known = weight in parameters and (bias is None or bias in parameters)
        return Site(node, "column", x, weight, bias) if known else None
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = arguments
        known = weight in parameters and bias in parameters and len(sizes_of(bias)) == 1
        return Site(node, "column", x, weight, bias, transposed=True) if known else None
    if node.target is aten.embedding.default and given(node) in parameters:
        plain = all(one in (-1, False) for one in arguments[2:])  # no row without a gradient, no scaling by frequency
        return Site(node, "embed", given(node, 1), given(node)) if plain else None
    return None


def _enter(found: Spread, site: Site, ends: set[fx.Node]) -> bool:
    """Take in a matrix that can be divided; whether it is."""
    name = found.captured.parameters[site.weight]
    bias = None if site.bias is None else found.captured.parameters[site.bias]
    alone = name not in found.kept and (bias is None or owner(bias) == owner(name))
    value = found.values.get(site.x)
    if site.kind == "embed":
        if value is None and alone and _reads(site.x, found.captured.inputs):
            found.sites.append(site)
            return True
        return False
    if value is None:
        n = sizes_of(site.node)[-1]
        if not alone or n < 2:
            return False
        if site.node in ends:
            found.sites.append(Site(site.node, "head", site.x, site.weight, site.bias, site.transposed))
            return True
        atoms = found.atoms.new(n)
        dims = dims_of(sizes_of(site.node))
        labels = atoms.reshape([1] * (sum(map(len, dims)) - 1) + [n])
        found.values[site.node] = Value(dims, labels)
        found.sites.append(Site(site.node, "column", site.x, site.weight, site.bias, site.transposed, atoms))
        return True
    last = len(sizes_of(site.x)) - 1
    if isinstance(value, Value) and alone and not any(value.labelled(dim) for dim in range(last)):
        atoms = value.labels.reshape(-1)
        if len(atoms) == sizes_of(site.x)[-1]:
            found.sites.append(Site(site.node, "row", site.x, site.weight, site.bias, site.transposed, atoms))
            return True
    _need_whole(found, site.node)
    return True


def _need_whole(found: Spread, node: fx.Node) -> None:
    for one in node.all_input_nodes:
        value = found.values.get(one)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                found.atoms.stop(each.labels, node)


def _ends(captured: Captured) -> set[fx.Node]:
    """The operators whose result the module returns as it is, or cast."""
    found = set()
    for leaf in captured.leaves():
        while isinstance(leaf, fx.Node) and leaf.op == "call_function":
            found.add(leaf)
            if leaf.target not in (aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.view.default):
                break
            if sizes_of(leaf)[-1] != sizes_of(given(leaf))[-1]:
                break
            leaf = given(leaf)
    return {node for node in found if len(node.users) == 1}


def _reads(node: fx.Node, inputs: fx.Node) -> bool:
    """Whether values of the input, not only its sizes, are in what a node makes."""
    queue, seen = [node], {node}
    while queue:
        one = queue.pop()
        if one is inputs:
            return True
        fresh = {each for each in one.all_input_nodes if isinstance(each.meta.get("val"), Tensor)} - seen
        if one.target is aten.sym_size.int:
            continue
        seen |= fresh
        queue += fresh
    return False


def _whole(found: Spread) -> dict[str, fx.Node | None]:
    """The weights that cannot be divided after all, with the operator because of which."""
    captured, classes = found.captured, found.classes
    more: dict[str, fx.Node | None] = {}
    for site in found.sites:
        name = captured.parameters[site.weight]
        if site.kind in ("column", "row"):
            of = classes[site.atoms]
            if bool((of == WHOLE).any()) or len(of.unique()) == 1:
                more[name] = found.atoms.culprit(site.atoms)
    # A matrix that is used once more, in another way, has no one place.
    uses = Counter(name for node, name in captured.parameters.items() for _ in node.users)
    kinds: dict[str, list[Site]] = {}
    for site in found.sites:
        kinds.setdefault(captured.parameters[site.weight], []).append(site)
    for name, sites in kinds.items():
        tied = {site.kind for site in sites} <= {"embed", "head"} and not any(site.transposed for site in sites)
        if len(sites) < uses[name] or (len(sites) > 1 and not tied):
            other = next((user for node, own in captured.parameters.items() if own == name for user in node.users
                          if user not in {site.node for site in sites}), sites[-1].node)  # fmt: skip
            more.setdefault(name, other)
        bias = next((site.bias for site in sites if site.bias is not None), None)
        if bias is not None and uses[captured.parameters[bias]] > 1:
            more.setdefault(name, sites[-1].node)
    return {name: node for name, node in more.items() if name not in found.kept}
