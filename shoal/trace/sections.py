"""A traced model as layers that one tensor passes between.

The graph can be cut wherever one tensor that depends on parameters is all that is needed further on. Cuts inside a
repeated block are left out, and so are those that would leave a layer without parameters. What is made of the input
alone (masks, angles, sizes) is no obstacle: where several layers read it, it is made once a micro-batch, by every rank
for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from shoal.model.context import Batch
from shoal.trace.capture import Captured, aten, given, path_of


@dataclass
class Traced:
    """What layers may know of a micro-batch: the batch, and what several of them read that is made of its input."""

    batch: Batch
    shared: Mapping[fx.Node, Any]


class Part:
    """Some nodes of a traced graph as a function of its own: of what enters it, to what ``results`` make of it.

    It can be changed until it runs: ``graph`` has a copy of each node, which ``copy_of`` finds.
    """

    def __init__(self, captured: Captured, nodes: Sequence[fx.Node], results: Any, device: torch.device) -> None:
        self.graph = fx.Graph()
        self.modules = nn.Module()
        self.copy_of: dict[fx.Node, fx.Node] = {}
        self.inside = inside = set(nodes)
        self.enters: list[fx.Node] = []
        """What enters, in the order of the arguments: nodes of the traced graph."""
        needed = {one for node in nodes for one in node.all_input_nodes}
        needed |= {one for one in pytree.tree_leaves(results) if isinstance(one, fx.Node)}
        for node in captured.graph.nodes:
            if node in needed and node not in inside:
                self.enters.append(node)
                self.copy_of[node] = self.graph.placeholder(f"in_{node.name}")
        for node in captured.graph.nodes:
            if node in inside:
                self.copy_of[node] = made = self.graph.node_copy(node, lambda one: self.copy_of[one])
                made.args, made.kwargs = (_on(device, one) for one in (made.args, made.kwargs))
                if node.target is aten.dropout.default:
                    self.call(
                        node, _Dropout(captured.module.get_submodule(path_of(node)), given(node, 1)), node.args[:1]
                    )
        self.graph.output(fx.node.map_arg(results, lambda one: self.copy_of[one]))
        self._compiled: fx.GraphModule | None = None

    def call(self, node: fx.Node, module: nn.Module, arguments: Sequence[Any]) -> None:
        """Have ``module`` make, of ``arguments`` (nodes of the traced graph), what ``node`` made."""
        name = f"at_{self.copy_of[node].name}"
        self.modules.add_module(name, module)
        with self.graph.inserting_after(self.copy_of[node]):
            given = tuple(None if one is None else self.copy_of[one] for one in arguments)
            made = self.graph.call_module(name, given)
        self.copy_of[node].replace_all_uses_with(made)
        self.graph.erase_node(self.copy_of[node])
        self.copy_of[node] = made

    def enter_by(self, node: fx.Node, source: fx.Node, module: nn.Module) -> None:
        """Have what ``node`` takes from ``source`` go through ``module`` first."""
        name = f"into_{self.copy_of[node].name}_{self.copy_of[source].name}"
        self.modules.add_module(name, module)
        with self.graph.inserting_before(self.copy_of[node]):
            made = self.graph.call_module(name, (self.copy_of[source],))
        self.copy_of[node].replace_input_with(self.copy_of[source], made)

    def __call__(self, *entering: Any) -> Any:
        if self._compiled is None:
            self._compiled = fx.GraphModule(self.modules, self.graph)
        return self._compiled(*entering)


class Section(nn.Module):
    """One layer of a traced model: of what the layer before made, and what both know of the micro-batch."""

    def __init__(self, part: Part, stream: fx.Node | None, holders: Mapping[str, nn.Module], sources: _Sources) -> None:
        super().__init__()
        self._modules.update(holders)  # under the dotted names that they have in the user's module
        self.part, self.stream, self._sources = part, stream, sources
        self.returns: pytree.TreeSpec | None = None

    def forward(self, x: Tensor, ctx: Traced) -> Any:
        entering = [x if one is self.stream else self._sources.value(one, ctx) for one in self.part.enters]
        found = self.part(*entering)
        return found if self.returns is None else pytree.tree_unflatten(found, self.returns)


class _Sources:
    """Where the values of placeholders are, at any time: a user's module may be given other parameters later."""

    def __init__(self, captured: Captured, device: torch.device) -> None:
        self._constants = {node: value.to(device) for node, value in captured.constants.items()}
        self._tensors = {}
        for node, name in {**captured.parameters, **captured.buffers}.items():
            module, _, local = name.rpartition(".")
            owner = captured.module.get_submodule(module)
            self._tensors[node] = (owner._parameters if node in captured.parameters else owner._buffers), local

    def value(self, node: fx.Node, ctx: Traced) -> Any:
        if node in ctx.shared:
            return ctx.shared[node]
        if node in self._tensors:
            tensors, name = self._tensors[node]
            return tensors[name]
        return self._constants[node]


class Prelude:
    """What several layers read, made of the input alone."""

    def __init__(self, captured: Captured, nodes: Sequence[fx.Node], sources: _Sources, device: torch.device) -> None:
        self._inputs, self._results, self._sources = captured.inputs, list(nodes), sources
        inside = [one for one in _closure(nodes) if one.op == "call_function"]
        self._part = Part(captured, sorted(inside, key=_places(captured).__getitem__), list(nodes), device)
        self.buffers = [captured.buffers[one] for one in self._part.enters if one in captured.buffers]
        """The names of the buffers that it reads."""

    def __call__(self, batch: Batch) -> Traced:
        given = Traced(batch, {self._inputs: batch["inputs"]})
        with torch.no_grad():
            made = self._part(*(self._sources.value(one, given) for one in self._part.enters))
        return Traced(batch, {self._inputs: batch["inputs"], **dict(zip(self._results, made, strict=True))})


def sections(captured: Captured, reached: set[fx.Node], device: torch.device) -> tuple[Prelude, list[Section]]:
    """The layers of a traced model on ``device``, and what is made before them. ``reached`` is what depends on
    parameters."""
    stream = [node for node in captured.graph.nodes if node in reached and node.op == "call_function"]
    groups = _grouped(captured, stream)
    home = {node: at for at, group in enumerate(groups) for node in group}
    readers = _readers(captured, reached, home, len(groups))
    leaves = captured.leaves()
    sources, places = _Sources(captured, device), _places(captured)
    plans: list[tuple[list[fx.Node], fx.Node | None]] = []
    wanted: set[fx.Node] = set()
    entering: fx.Node | None = None
    for at, group in enumerate(groups):
        own = [node for node, theirs in readers.items() if theirs == {at} and node.op == "call_function"]
        nodes = sorted([*group, *own], key=places.__getitem__)
        plans.append((nodes, entering))
        needed = {one for node in nodes for one in node.all_input_nodes}
        if at == len(groups) - 1:
            needed |= {one for one in leaves if isinstance(one, fx.Node)}
        wanted |= {one for one in needed - set(nodes) if len(readers.get(one, ())) > 1}
        entering = _live(home, at)
    wanted -= {captured.inputs, *captured.constants}
    prelude = Prelude(captured, sorted(wanted, key=places.__getitem__), sources, device)
    made = []
    for at, (nodes, before) in enumerate(plans):
        last = at == len(plans) - 1
        results = leaves if last else plans[at + 1][1]
        part = Part(captured, nodes, results, device)
        made.append(Section(part, before, _holders(captured, part, wanted, at == 0), sources))
    made[-1].returns = captured.returns
    _share(made)
    return prelude, made


def _share(made: Sequence[Section]) -> None:
    """One object for each holder that several layers have."""
    first: dict[str, nn.Module] = {}
    for section in made:
        for name, holder in section._modules.items():
            assert holder is not None
            section._modules[name] = first.setdefault(name, holder)


class _Holder(nn.Module):
    """The parameters and buffers of one of the user's modules, without what is inside it."""

    def __init__(self, owner: nn.Module, buffers: bool) -> None:
        super().__init__()
        self._parameters = owner._parameters
        if buffers:
            self._buffers = owner._buffers


def _holders(captured: Captured, part: Part, shared: set[fx.Node], first: bool) -> dict[str, nn.Module]:
    """The modules whose parameters and buffers a layer computes with; the first also has those that none does."""
    module = captured.module
    every: dict[nn.Parameter, list[str]] = {}
    for name, one in module.named_parameters(remove_duplicate=False):
        every.setdefault(one, []).append(name)
    names = [every[module.get_parameter(captured.parameters[one])] for one in part.enters if one in captured.parameters]
    if first:
        used = {name for node, name in captured.parameters.items() if node.users}
        names += [theirs for one, theirs in every.items() if theirs[0] not in used]
    own = {one for one in part.enters if one in captured.buffers} - shared
    buffers = {captured.buffers[one].rpartition(".")[0] for one in own}
    owners = {name.rpartition(".")[0] for theirs in names for name in theirs} | buffers
    return {one: _Holder(module.get_submodule(one), one in buffers) for one in sorted(owners)}


def _grouped(captured: Captured, stream: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The nodes of each layer."""
    place = {node: at for at, node in enumerate(stream)}
    last_use = [
        max((place.get(user, len(stream)) for user in node.users), default=at) for at, node in enumerate(stream)
    ]
    groups: list[list[fx.Node]] = [[]]
    alive: set[int] = set()
    for at, node in enumerate(stream):
        groups[-1].append(node)
        alive = {one for one in alive | {at} if last_use[one] > at}
        if len(alive) == 1 and at + 1 < len(stream) and _passes(stream[next(iter(alive))]):
            groups.append([])
    found: list[list[fx.Node]] = []
    ahead: list[fx.Node] = []  # without parameters, and of the block that comes
    for group in groups:
        here = _blocks(group)
        bare = not any(one in captured.parameters for node in group for one in node.all_input_nodes)
        if bare and (not found or here - _blocks(found[-1])):
            ahead += group
        elif found and (bare or _blocks(found[-1]) & here):
            found[-1] += [*ahead, *group]
            ahead = []
        else:
            found.append([*ahead, *group])
            ahead = []
    if ahead:
        found = [*found[:-1], [*(found[-1] if found else []), *ahead]]
    return _owners_together(captured, found)


def _passes(node: fx.Node) -> bool:
    """Whether a pipeline can pass on what a node makes."""
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.is_floating_point()


def _blocks(nodes: Sequence[fx.Node]) -> set[str]:
    """The repeated blocks, children of a list by number, that nodes belong to: the outermost."""
    found = set()
    for node in nodes:
        names = path_of(node).split(".")
        number = next((at for at, name in enumerate(names) if name.isdigit()), None)
        if number is not None:
            found.add(".".join(names[: number + 1]))
    return found


def _owners_together(captured: Captured, groups: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """Layers that compute with different parameters of one module become one layer, with all in between."""
    while True:
        users: dict[str, dict[str, set[int]]] = {}
        for at, group in enumerate(groups):
            for one in {each for node in group for each in node.all_input_nodes if each in captured.parameters}:
                name = captured.parameters[one]
                users.setdefault(name.rpartition(".")[0], {}).setdefault(name, set()).add(at)
        for of in users.values():
            every = set().union(*of.values())
            if any(theirs != every for theirs in of.values()):
                low, high = min(every), max(every)
                joined = [node for group in groups[low : high + 1] for node in group]
                groups = [*groups[:low], joined, *groups[high + 1 :]]
                break
        else:
            return groups


def _live(home: Mapping[fx.Node, int], at: int) -> fx.Node | None:
    """What passes from layer ``at`` to the next: the one tensor made up to there that is used after."""
    for node, where in home.items():
        if where <= at and any(home.get(user, len(home)) > at for user in node.users):
            return node
    return None


def _readers(
    captured: Captured, reached: set[fx.Node], home: Mapping[fx.Node, int], layers: int
) -> dict[fx.Node, set[int]]:
    """Of what depends on no parameter, the layers that need it, themselves or through others."""
    found: dict[fx.Node, set[int]] = {}
    for node in reversed(captured.graph.nodes):
        if node in reached or node.op == "output":
            continue
        found[node] = set()
        for user in node.users:
            if user.op == "output":
                found[node].add(layers - 1)
            else:
                found[node] |= {home[user]} if user in home else found.get(user, set())
    return found


def _closure(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    queue, seen = list(nodes), set(nodes)
    while queue:
        for one in queue.pop().all_input_nodes:
            if one not in seen:
                seen.add(one)
                queue.append(one)
    return seen


def _places(captured: Captured) -> dict[fx.Node, int]:
    return {node: at for at, node in enumerate(captured.graph.nodes)}


def _on(device: torch.device, arguments: Any) -> Any:
    """Arguments with ``device`` for the one that was traced on."""
    return fx.node.map_aggregate(arguments, lambda one: device if isinstance(one, torch.device) else one)


class _Dropout(nn.Module):
    """Dropout, while the module that calls it trains."""

    def __init__(self, caller: nn.Module, rate: Any) -> None:
        super().__init__()
        self._caller, self._rate = (caller,), rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(x, self._rate, self._caller[0].training)
