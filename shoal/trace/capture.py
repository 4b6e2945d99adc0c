"""A user's module as a graph of operators, with nothing left out that would change what it computes.

``torch.export`` runs the module once on tensors without memory, with sizes of the input as symbols where the module
lets them be, and writes down every operator, the module it was called from, and the line of the user's source. What
such a graph would get wrong is refused by name: branches on values, buffers that are written to, and a forward pass
that is another one in evaluation than in training, other than by dropout.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from shoal.errors import ConfigError
from shoal.model.task import evaluating
from shoal.trace.labels import size

aten = torch.ops.aten
ADVICE = "use dp or zero, which run the module as it is"
_MAY_RETURN_ITS_INPUT = ("dropout", "reshape", "flatten", "contiguous", "to", "chunk", "unflatten")
_NO_EFFECT = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")


@dataclass(frozen=True)
class Captured:
    """The operators of a module, in order.

    ``parameters`` and ``buffers`` give the name of what each such placeholder of the ``graph`` stands for (the first of
    its names, where it has several), ``constants`` its values; ``inputs`` is the placeholder of the module's input,
    whose sizes are those of ``shape`` (None where any will do). The graph returns the leaves of what the module gives,
    of the structure ``returns``.
    """

    module: nn.Module
    graph: fx.Graph
    parameters: Mapping[fx.Node, str]
    buffers: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, Tensor]
    inputs: fx.Node
    shape: tuple[int | None, ...]
    returns: pytree.TreeSpec

    def leaves(self) -> list[Any]:
        """The leaves of what the module returns: nodes, or values that are no tensors."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]


def capture(module: nn.Module, inputs: Tensor) -> Captured:
    """The graph of ``module(inputs)``, in training. Raises :class:`ConfigError` where there is none, or one that does
    not tell all."""
    device = next((one.device for one in module.parameters()), inputs.device)
    inputs = inputs.to(device)
    before = [(one, one.training) for one in module.modules()]
    module.train()
    try:
        training = _export(module, inputs)
    finally:
        for one, was in before:
            one.training = was
    with evaluating(module):
        evaluation = _export(module, inputs)
    _check_alike(training, evaluation)
    graph = training.graph
    _strip(graph)
    signature = training.graph_signature
    of_kind: dict[InputKind, dict[fx.Node, str]] = {}
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    given = []
    for spec in signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            given.append(node)
        else:
            of_kind.setdefault(spec.kind, {})[node] = spec.target or ""
    constants = {
        node: _constant(training.constants[name]) for node, name in of_kind.get(InputKind.CONSTANT_TENSOR, {}).items()
    }
    (entry,) = given
    first: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first.setdefault(parameter, name)
    named = {node: first[module.get_parameter(name)] for node, name in of_kind.get(InputKind.PARAMETER, {}).items()}
    sizes = tuple(found if isinstance(found := size(n), int) else None for n in sizes_of(entry))
    assert training.call_spec.out_spec is not None
    return Captured(
        module,
        graph,
        named,
        of_kind.get(InputKind.BUFFER, {}),
        constants,
        entry,
        sizes,
        training.call_spec.out_spec,
    )


def where(node: fx.Node) -> str:
    """An operator as a user knows it: its name, the module that called it, and the line of source."""
    module = path_of(node)
    line = _source_line(node)
    at = f" ({line})" if line else ""
    return f"{operator_name(node)} in {module or 'the module'}{at}"


def operator_name(node: fx.Node) -> str:
    """As in PyTorch's table of operators: ``aten.cumsum``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).rpartition(".")[0]
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))


def path_of(node: fx.Node) -> str:
    """The dotted name of the innermost module that called the operator."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [name for name, _ in stack.values()]
    return str(names[-1]).partition("@")[0] if names else ""


def _source_line(node: fx.Node) -> str:
    """file:line of the user's own code, or what there is."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [each for each in found if "/torch/" not in each[0]] or found
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""


def _export(module: nn.Module, inputs: Tensor) -> ExportedProgram:
    sizes = dict.fromkeys(range(inputs.ndim), Dim.AUTO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.export.export(module, (inputs,), dynamic_shapes=(sizes,), strict=False)
    except Exception as error:
        problem = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"Engine: {type(module).__name__} cannot be traced: {type(error).__name__}: {problem}; {ADVICE}"
        ) from error
    _write_out(found)
    for spec in found.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            what = "its input" if spec.kind is OutputKind.USER_INPUT_MUTATION else f"the buffer {spec.target}"
            raise ConfigError(f"Engine: {type(module).__name__} cannot be traced: it writes to {what}; {ADVICE}")
    _without_writes(found)
    return found


def _write_out(program: ExportedProgram) -> None:
    """Put the operators of regions without gradients where these stand. Refuse such a region, and any other operator of
    operators (autocast, control flow), where a parameter reaches it: what it changes about gradients would be lost."""
    graph, names = program.graph, program.graph_signature.inputs_to_parameters
    reached: set[fx.Node] = set()
    for node in list(graph.nodes):
        depends = any(one in reached for one in node.all_input_nodes)
        if depends or (node.op == "placeholder" and node.name in names):
            reached.add(node)
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        if depends or node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            raise ConfigError(f"Engine: the module cannot be traced past {where(node)}; {ADVICE}")
        _, inner, *arguments = node.args
        body: fx.Graph = getattr(program.graph_module, inner.target).graph
        entries = [one for one in body.nodes if one.op == "placeholder"]
        with graph.inserting_before(node):
            results = graph.graph_copy(body, dict(zip(entries, arguments, strict=True)))
        for user in list(node.users):
            assert user.target is operator.getitem, "a region returns a tuple"
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def _without_writes(program: ExportedProgram) -> None:
    """Operators that write to their input become those that make a new tensor. Refuses a write to what others see."""
    graph, buffers = program.graph, program.graph_signature.inputs_to_buffers
    for node in list(graph.nodes):
        op = node.target
        if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable:
            continue
        written = given(node)
        name = op._schema.name.rpartition("::")[2]
        other = getattr(getattr(aten, name.removesuffix("_"), None), op._overloadname, None)
        if written.op == "placeholder":
            what = f"the buffer {buffers[written.name]}" if written.name in buffers else written.name
            raise ConfigError(
                f"Engine: the module cannot be traced past {where(node)}, which writes to {what}; {ADVICE}"
            )
        shares = not name.endswith("_") or other is None or _is_view(written)
        if shares or any(_is_view(user) for user in written.users if user is not node):
            raise ConfigError(
                f"Engine: the module cannot be traced past {where(node)}, which writes to a view; {ADVICE}"
            )
        node.target = other
        after = False
        later = set()
        for one in graph.nodes:
            if after and written in one.all_input_nodes:
                later.add(one)
            after = after or one is node
        for one in later:
            one.replace_input_with(written, node)


def _is_view(node: fx.Node) -> bool:
    """Whether what a node makes may be the memory of what it takes."""
    if node.target is operator.getitem:
        return _is_view(given(node))
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    # What is composed of other operators (reshape, to, contiguous) may return its input without saying so.
    returns = node.target._schema.returns
    composed = node.target._schema.name.rpartition("::")[2] in _MAY_RETURN_ITS_INPUT
    return composed or any(one.alias_info is not None for one in returns)


def _check_alike(training: ExportedProgram, evaluation: ExportedProgram) -> None:
    """Refuse a module that computes something else in evaluation, dropout aside."""
    ours, theirs = _steps(training.graph), _steps(evaluation.graph)
    for (node, step), (_, other) in zip(ours, theirs, strict=False):
        if step != other:
            raise ConfigError(f"Engine: the module is another one in evaluation from {where(node)} on; {ADVICE}")
    if len(ours) != len(theirs):
        raise ConfigError(f"Engine: the module has {len(ours)} operators in training, else {len(theirs)}; {ADVICE}")


def _steps(graph: fx.Graph) -> list[tuple[fx.Node, str]]:
    """Every operator with what it takes in, by number; dropout is none."""
    number: dict[fx.Node, str] = {}
    found: list[tuple[fx.Node, str]] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            number[node] = node.name
        elif isinstance(node.target, torch._ops.OpOverload) and operator_name(node).partition(".")[2] in _NO_EFFECT:
            continue
        elif node.target is aten.dropout.default:
            number[node] = number[given(node)]
        else:
            known: Any = lambda one: _Known(number[one])  # noqa: E731
            arguments = fx.node.map_arg((node.args, node.kwargs), known)
            found.append((node, f"{node.target} {arguments}"))
            number[node] = f"%{len(found)}"
    return found


@dataclass(frozen=True)
class _Known:
    name: str

    def __repr__(self) -> str:
        return self.name


def _strip(graph: fx.Graph) -> None:
    """Take out what only checks, and what nobody reads."""
    for node in reversed(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and operator_name(node).partition(".")[2] in _NO_EFFECT:
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def _constant(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.is_meta:
        raise ConfigError(f"Engine: the module makes a constant while it runs that has no values here; {ADVICE}")
    return value.detach()


def sizes_of(node: fx.Node) -> Sequence[Any]:
    """The sizes of the tensor that ``node`` makes: ints, and SymInts that depend on the input's."""
    return node.meta["val"].shape  # type: ignore[no-any-return]


def given(node: fx.Node, place: int = 0) -> Any:
    """An argument of an operator that is always given by its place."""
    return node.args[place]
