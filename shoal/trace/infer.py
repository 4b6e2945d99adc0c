"""The role of every module of a traced model, from what can be divided of it.

Classes of atoms become the terms that interpreters read: where the classes of a matrix's outputs begin again is a part
(query, key and value in one matrix), what is joined within a part is a head, a matrix whose heads meet a softmax is
attention's. What is in no such order has no role, and stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, fx, nn

from shoal.model.roles import REPLICATED, Role
from shoal.trace.capture import Captured, operator_name, path_of, where
from shoal.trace.labels import Value
from shoal.trace.rules import ATTENTION, name_of
from shoal.trace.spread import Site, Spread, owner, spread


@dataclass(frozen=True)
class Inferred:
    """The roles of a traced model's modules, and why weights stay whole: ``kept`` gives the operator of each, or None
    where it is what the weight itself is. ``granules`` is in how many parts the heads of each divided module may go."""

    spread: Spread
    roles: dict[str, Role]
    kept: dict[str, fx.Node | None]
    granules: dict[str, int]


@dataclass(frozen=True)
class _Order:
    """How the features of a matrix are in order: parts of ``widths``, of ``granules`` each."""

    widths: tuple[int, ...]
    granules: int


def infer(captured: Captured) -> Inferred:
    """The roles of the modules of ``captured``."""
    found = spread(captured)
    while unordered := _unordered(found):
        found = spread(captured, {**found.kept, **unordered})
    attended = _attended(found)
    classes, within = found.classes, found.atoms.classes(within=True)
    roles, granules = {}, {}
    bundles = _bundles(found)
    for site in found.sites:
        for module in _owners(captured, site):
            if site.kind in ("embed", "head"):
                roles[module] = Role(site.kind, transposed=site.transposed)
                continue
            order = _order(classes[site.atoms])
            assert order is not None
            heads = _heads(within[site.atoms], order) if site.kind == "column" else 0
            roles[module] = _role(site, order, heads, bool(torch.isin(classes[site.atoms], attended).any()))
            granules[module] = order.granules
    for bundle in bundles:
        _agree(captured, bundle, roles, granules)
    for module, kind in _beside(found).items():
        roles.setdefault(module, kind)
    return Inferred(found, roles, found.kept, granules)


def _role(site: Site, order: _Order, heads: int, attends: bool) -> Role:
    if site.kind == "row":
        return Role("out_proj" if attends else "down", transposed=site.transposed)
    parts: tuple[tuple[str, int], ...] = ()
    if len(order.widths) > 1:
        usual = ("q", "k", "v") if attends else ("gate", "up")
        count = len(order.widths)
        names = usual if len(usual) == count else tuple(f"part{number}" for number in range(count))
        parts = tuple(zip(names, order.widths, strict=True))
    kind = "qkv" if attends else "gate_up"
    return Role(kind, parts, heads, fused=bool(parts), transposed=site.transposed)  # type: ignore[arg-type]


def _agree(captured: Captured, bundle: Sequence[Site], roles: dict[str, Role], granules: dict[str, int]) -> None:
    """Head counts of matrices that work together: how many key and value heads there are, the fewest, is known of all;
    what adds heads up has as many as the queries."""
    columns = [module for site in bundle if site.kind == "column" for module in _owners(captured, site)]
    rows = [module for site in bundle if site.kind == "row" for module in _owners(captured, site)]
    if not any(roles[module].heads for module in columns):
        return
    for module in columns:  # without a head of its own where nothing joins what is in one
        roles[module] = replace(roles[module], heads=roles[module].heads or granules[module])
    counts = [roles[module].heads for module in columns]
    fewest = min(granules[module] for module in columns)
    for module in columns:
        roles[module] = replace(roles[module], kv_heads=fewest)
    for module in rows:
        roles[module] = replace(roles[module], heads=max(counts), kv_heads=fewest)


def _order(of: Tensor) -> _Order | None:
    """How classes follow each other: in each part all of them, in the same order, equally often."""
    runs = [(one, len(list(run))) for one, run in groupby(of.tolist())]
    first = [one for one, _ in runs]
    count = next((at for at in range(1, len(first)) if first[at] == first[0]), len(first))
    parts = [runs[start : start + count] for start in range(0, len(runs), count)]
    if len(set(first[:count])) < count or any([one for one, _ in part] != first[:count] for part in parts):
        return None
    if any(len({length for _, length in part}) > 1 for part in parts):
        return None
    return _Order(tuple(sum(length for _, length in part) for part in parts), count)


def _heads(within: Tensor, order: _Order) -> int:
    """How many heads the first part has: what its own use joins; 0 where that is nothing."""
    width = order.widths[0]
    found = len(within[:width].unique())
    return found if found < width else 0 if order.granules == width else order.granules


def _unordered(found: Spread) -> dict[str, fx.Node | None]:
    """The weights whose features are in an order that no role tells, with the operator that uses them."""
    classes = found.classes
    more: dict[str, fx.Node | None] = {}
    for site in found.sites:
        if site.kind in ("column", "row"):
            order = _order(classes[site.atoms])
            if order is None or (site.kind == "row" and len(order.widths) > 1):
                more[found.captured.parameters[site.weight]] = site.node
    return more


def _bundles(found: Spread) -> list[list[Site]]:
    """The matrices whose features share classes."""
    bundles: dict[int, list[Site]] = {}
    for site in found.sites:
        if site.kind in ("column", "row"):
            # Those that share any share all: each has every class of its bundle, or is in no order.
            bundles.setdefault(int(found.classes[site.atoms].min()), []).append(site)
    return list(bundles.values())


def _attended(found: Spread) -> Tensor:
    """The classes that meet a softmax."""
    classes = found.classes
    met = [
        classes[value.labels.reshape(-1)]
        for node in found.captured.graph.nodes
        if name_of(node) in ATTENTION
        for one in (node, *node.all_input_nodes)
        if isinstance(value := found.values.get(one), Value)
    ]
    return torch.cat(met).unique() if met else torch.empty(0, dtype=torch.long)


def _owners(captured: Captured, site: Site) -> list[str]:
    """The modules whose parameter a site's matrix is, of those that share it the ones that use it so."""
    weight = captured.module.get_parameter(captured.parameters[site.weight])
    every = [owner(name) for name, one in captured.module.named_parameters(remove_duplicate=False) if one is weight]
    tables = [name for name in every if isinstance(captured.module.get_submodule(name), nn.Embedding)]
    rest = [name for name in every if name not in tables]
    return (tables if site.kind == "embed" else rest) or every


def _beside(found: Spread) -> dict[str, Role]:
    """Norms, and tables of positions: told from what computes with their parameters."""
    captured, roles = found.captured, dict[str, Role]()
    roots = {path_of(node) for node in captured.graph.nodes if name_of(node) in ("rsqrt", "layer_norm", "rms_norm")}
    for node, name in captured.parameters.items():
        module = owner(name)
        for user in node.users:
            if name_of(user) == "embedding":
                if user.args[0] is node and name not in found.kept:
                    roles[module] = Role("position")
            elif path_of(user) == module and module in roots and len(node.meta["val"].shape) == 1:
                roles[module] = Role("norm")
    return roles


def table(inferred: Inferred) -> str:
    """The roles as a table to read: one line a module, those of repeated blocks together, and for weights that stay
    whole the operator that keeps them so."""
    lines: dict[str, list[str]] = {}
    captured = inferred.spread.captured
    for name, parameter in captured.module.named_parameters():
        module = owner(name)
        role = inferred.roles.get(module, REPLICATED)
        words = _words(role)
        if role is REPLICATED and parameter.ndim == 2:
            reason = inferred.kept.get(name)
            words += f"   kept whole by {operator_name(reason)} in {path_of(reason) or 'the module'}" if reason else ""
        lines.setdefault(f"{_starred(module) or '(the module)'}\t{_starred(words)}", []).append(module)
    width = max((len(line.partition("\t")[0]) for line in lines), default=0)
    return "\n".join(f"{name:<{width}}  {words}" for name, _, words in (line.partition("\t") for line in lines))


def _words(role: Role) -> str:
    found: str = role.kind
    if role.parts:
        found += " of " + ", ".join(f"{name} {rows}" for name, rows in role.parts)
    if role.heads:
        found += f", {role.heads} heads" + (f" of {role.kv_heads} groups" if role.kv_heads != role.heads else "")
    return found + (", transposed" if role.transposed else "")


def _starred(name: str) -> str:
    """A dotted name with a star for each number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def refusal(inferred: Inferred) -> str:
    """Which operator stops what, where nothing can be divided."""
    reasons = {name: node for name, node in inferred.kept.items() if node is not None}
    for name, node in reasons.items():
        return f"{where(node)} needs all of what {owner(name) or 'the module'} makes"
    return "it has no matrix whose outputs only go to another"
