"""Runs a Program: the passes of this rank's stages, what moves between them, and the step's reductions and update.

What reducing, taking the norm and updating mean is handed in, and so is what happens around the use of a unit's
parameters: the executor is the same whatever shards weights and gradients. Everything that lives from one action to
another is keyed by (stage, micro-batch), so a rank may hold any stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shoal.errors import ConfigError
from shoal.meter import mark
from shoal.model.context import Batch, Context
from shoal.model.task import Task
from shoal.pipeline.arrival import arrive
from shoal.pipeline.lines import Lines
from shoal.pipeline.mail import Form, Kind, Mail, kind_of
from shoal.pipeline.program import Act, Op, Program
from shoal.pipeline.trace import Recorder
from shoal.pipeline.watch import Watch
from shoal.pipeline.weights import Version, Weights
from shoal.purposes import LOGITS

Layer = Callable[[Tensor, Any], Tensor]
"""A layer as a function of its input and the micro-batch's context."""
Contribution = Callable[[], None]
"""Makes a part of the gradient of a weight."""
_Place = tuple[int, int]  # stage, micro-batch


def _nothing(*_: object) -> None:
    """For a handler that has nothing to do."""


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of the model, each with the number of its unit (the layer's place in the whole model)."""

    number: int
    first: bool
    last: bool
    layers: tuple[tuple[int, Layer], ...]


@dataclass(frozen=True)
class Handlers:
    """What the engine does at the actions that are not passes, and around the passes through a unit.

    In every backward pass ``unit_done(unit, final)`` is called as soon as its gradients of a unit are complete, last
    unit first; ``final`` says that no further pass will add to them before they are reduced. ``reduce(stage, first)``
    comes after the last pass of a stage in a batch; it, ``norm(first)`` and ``update(first)`` name the batch by its
    first micro-batch, or by −1 in a program of one.

    ``enter_unit(unit, backward)`` is called before a unit's parameters are used: in a forward pass, which ends with
    ``leave_unit(unit)``, and in every backward pass, which ends with ``unit_done``, whether it reaches the unit or not.
    One that is recomputed is not entered again for that: it happens within its backward pass.
    """

    unit_done: Callable[[int, bool], None]
    reduce: Callable[[int, int], None]
    norm: Callable[[int], None]
    update: Callable[[int], None]
    postpone: Callable[[list[Contribution] | None], None] = _nothing
    """Has weight gradients wait in the list that is given, for all that can, until it is given None."""
    must_see: bool = False
    """Whether a backward pass must be followed from unit to unit: else a unit may be entered too late for its use."""
    enter_unit: Callable[[int, bool], None] = _nothing
    leave_unit: Callable[[int], None] = _nothing


class Executor:
    """Runs programs over the ``stages`` that this rank holds; ``lines`` join it to the others of its pipeline. A
    ``recorder`` may be asked to write down what happens."""

    def __init__(
        self, task: Task, stages: Iterable[Stage], handlers: Handlers, lines: Lines, recorder: Recorder | None = None
    ) -> None:
        self._task, self._handlers, self._lines = task, handlers, lines
        self._recorder = recorder or Recorder()
        self._stages = {stage.number: stage for stage in stages}
        self._forms: dict[tuple[int, Kind], Form] = {}

    def run(
        self,
        program: Program,
        batches: Sequence[Batch],
        contexts: Callable[[Batch], Any],
        scale: Callable[[int], Tensor] | None = None,
    ) -> Tensor:
        """Take the micro-batches ``batches`` through a program. Returns the summed loss, a float64 scalar, which is
        zero where the last stage is elsewhere.

        ``scale(b)`` is what the summed loss of micro-batch b is multiplied by before its backward pass; it is first
        asked for after a forward pass of the last stage, so that agreeing on it costs no waiting. Without it the
        program is one of forward passes alone, and no graph is kept.

        Raises :class:`LayoutError` where what goes from stage to stage is not one floating-point tensor whose shape
        follows from those of the micro-batch's tensors. Other errors get a note that says in which action they arose.
        """
        running = self.begin(program, _device(batches), scale)
        running.go(program, batches, contexts)
        running.check_done()
        return running.take_loss()

    def outputs(self, program: Program, batches: Sequence[Batch], contexts: Callable[[Batch], Any]) -> list[Tensor]:
        """The last stage's output for each micro-batch of a program of forward passes; none where it is elsewhere."""
        running = self.begin(program, _device(batches), end=lambda output, _: output)
        running.go(program, batches, contexts)
        running.check_done()
        return [running.ends[number] for number in sorted(running.ends)]

    def begin(
        self,
        program: Program,
        device: torch.device,
        scale: Callable[[int], Tensor] | None = None,
        *,
        end: Layer | None = None,
        weights: Weights | None = None,
    ) -> Running:
        """What runs a program, or a stream of programs that need no more ways between ranks than ``program`` does; see
        :meth:`run`. With ``weights``, each backward pass sees those that its forward pass saw. ``end`` makes what is
        kept of the last stage's output, the loss unless told."""
        self._lines.connect(program, device)
        mail = Mail(self._lines, self._forms, device)
        return Running(
            self._stages,
            self._handlers,
            self._task.enter,
            end or self._task.loss,
            scale,
            mail,
            device,
            weights,
            self._recorder,
        )


@dataclass
class _Pass:
    """A micro-batch between its two passes through a stage."""

    watch: Watch
    input: Form | None = None  # where its gradient goes back
    gradient: list[Tensor] = field(default_factory=list)
    """That gradient, once the backward pass has reached the input. A list, because the graph refers to it, and must not
    refer to what refers to the graph."""
    output: Form | None = None
    final: list[bool] = field(default_factory=lambda: [False])
    """Whether no other pass will add to the gradients that its backward pass adds to; a list, too."""
    version: Version | None = None
    edge: GradientEdge | None = None
    """Where the backward pass starts. The output itself is not kept: its memory goes when it has been received."""


@dataclass
class Running:
    """A run of a program, or of the parts of a stream one after another: its actions, and what they leave for later
    ones. Micro-batches are counted from the beginning.

    ``inputs`` and ``gradients`` hold what a stage has made for the one before or after it, under the receiver's place,
    until it is sent or, on the same rank, taken. ``ends`` has the losses that the last stage has made.
    """

    stages: Mapping[int, Stage]
    handlers: Handlers
    enter: Callable[[Batch], Tensor]
    end: Layer
    scale: Callable[[int], Tensor] | None
    mail: Mail
    device: torch.device
    weights: Weights | None
    recorder: Recorder
    batches: dict[int, Batch] = field(default_factory=dict)
    kinds: dict[int, Kind] = field(default_factory=dict)
    inputs: dict[_Place, tuple[Tensor, Form]] = field(default_factory=dict)
    gradients: dict[_Place, Tensor] = field(default_factory=dict)
    passes: dict[_Place, _Pass] = field(default_factory=dict)
    waiting: dict[_Place, list[Contribution]] = field(default_factory=dict)
    ends: dict[int, Tensor] = field(default_factory=dict)
    contexts: Callable[[Batch], Any] = _nothing
    completing: frozenset[Act] = frozenset()
    ages: Mapping[int, int] = field(default_factory=dict)

    def go(self, program: Program, batches: Sequence[Batch], contexts: Callable[[Batch], Any], first: int = 0) -> None:
        """Perform ``program``, whose micro-batch 0 is number ``first`` and which takes ``batches`` in."""
        self.contexts = contexts
        for number, batch in enumerate(batches, first):
            self.batches[number], self.kinds[number] = batch, kind_of(batch, train=self.scale is not None)
        self.completing = frozenset(_shifted(act, first) for act in program.last_contributions)
        self.ages = dict(enumerate(program.ages, first))
        perform = self.recorder.around(self.perform)
        with torch.set_grad_enabled(self.scale is not None):
            for act in program.actions:
                try:
                    perform(_shifted(act, first))
                except Exception as error:
                    error.add_note(f"in {_shifted(act, first).in_words()}")
                    raise
        self.batches.clear()
        self.kinds.clear()

    def check_done(self) -> None:
        """Nothing may be left under way."""
        left = [*self.inputs, *self.gradients, *self.passes, *self.waiting]
        assert not left, f"(stage, micro-batch) {left[0]}: a result without use, or a pass without answer"

    def take_loss(self) -> Tensor:
        """The sum of the losses that have been made since this was last asked, a float64 scalar."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.ends:
            total = total + torch.stack(list(self.ends.values())).double().sum()
            self.ends.clear()
        return total

    def perform(self, act: Act) -> None:
        _PERFORM[act.op](self, act)

    def _forward(self, act: Act) -> None:
        stage, number = self.stages[act.stage], act.micro_batch
        handlers = self.handlers  # the graph will refer to it: not to this run, which refers to the graph
        final = [False]
        watch = Watch(
            (unit for unit, _ in stage.layers),
            enter=lambda unit: handlers.enter_unit(unit, True),
            done=lambda unit: handlers.unit_done(unit, final[0]),
        )
        one = _Pass(watch, final=final)
        if self.weights is not None:
            one.version = self.weights.older(self.ages.get(number, 0))
            one.version.users += 1
            self.weights.use(one.version)
        # Whatever can be done before the input has arrived is done while it is on its way.
        ctx = self.contexts(self.batches[number])
        if isinstance(ctx, Context) and self.scale is not None:
            ctx.beside.scale = partial(self.scale, number)
        x, arrives = self._input(act, one)
        for unit, layer in stage.layers:
            if not watch.follow(unit, x) and handlers.must_see:
                raise ConfigError(
                    f"layer {unit} is given a {type(x).__name__}, whose gradients ZeRO-3 cannot follow; hand over "
                    "tensors, alone or in tuples, lists and dicts"
                )
            handlers.enter_unit(unit, False)
            if arrives:
                self.recorder.waits()
                self.mail.await_activation(act)
                self.recorder.arrived()
                arrives = False
            x = layer(x, ctx)
            handlers.leave_unit(unit)
        if stage.last:
            if isinstance(x, Tensor) and x.ndim > 0:  # else the last layer has made the loss of them
                mark(LOGITS, x)
            x = self.end(x, ctx)
            self.ends[number] = x.detach()
        else:
            one.output = self.mail.form(x, f"layer {stage.layers[-1][0]}, the last of stage {stage.number},")
            self.inputs[act.stage + 1, number] = x.detach(), one.output
        if self.scale is not None:
            one.edge = get_gradient_edge(x) if x.requires_grad else None
            self.passes[act.stage, number] = one

    def _input(self, act: Act, one: _Pass) -> tuple[Tensor, bool]:
        """What the first layer takes in, the oldest node of its graph (see :class:`Watch`); and whether that has yet to
        arrive from another rank."""
        if self.stages[act.stage].first:
            x = self.enter(self.batches[act.micro_batch])
            return x.view_as(x) if x.is_leaf and x.requires_grad else x, False
        arrives = (place := (act.stage, act.micro_batch)) not in self.inputs
        x, form = self.mail.activation(act, self.kinds[act.micro_batch]) if arrives else self.inputs.pop(place)
        if not form.needs_grad:
            return x, arrives
        one.input = form
        # What has yet to arrive is written to. A stage on this rank may have kept its output, and this one may write.
        return arrive(x.detach() if arrives else x.clone(), one.gradient.append), arrives

    def _backward(self, act: Act) -> None:
        one = self.passes.pop((act.stage, act.micro_batch))
        one.final[0] = act in self.completing
        if self.weights is not None and one.version is not None:
            self.weights.use(one.version)  # for what is recomputed
        if one.edge is not None:  # a loss may depend on no parameter here, and on some elsewhere
            one.watch.begin()
            torch.autograd.backward(one.edge, self._gradient(act))
        one.watch.end()
        if (form := one.input) is not None:
            found = one.gradient or [torch.zeros(form.shape, dtype=form.dtype, device=self.device)]
            self.gradients[act.stage - 1, act.micro_batch] = found[0]
            one.gradient.clear()  # weight gradients that wait refer to the graph, and that to this
        if one.version is not None:
            one.version.users -= 1

    def _input_gradient(self, act: Act) -> None:
        """A backward pass whose weight gradients wait. What has none that can wait has nothing left to do."""
        waiting = self.waiting[act.stage, act.micro_batch] = []
        self.handlers.postpone(waiting)
        try:
            self._backward(act)
        finally:
            self.handlers.postpone(None)

    def _weight_gradient(self, act: Act) -> None:
        waiting = self.waiting.pop((act.stage, act.micro_batch))
        with torch.no_grad():
            for place, contribution in enumerate(waiting):
                contribution()
                waiting[place] = _nothing  # and what it was made of may go
        if act in self.completing:
            for unit, _ in reversed(self.stages[act.stage].layers):
                self.handlers.unit_done(unit, True)

    def _send_activation(self, act: Act) -> None:
        output, form = self.inputs.pop((act.stage + 1, act.micro_batch))
        self.mail.send_activation(act, output, form, self.kinds[act.micro_batch])

    def _receive_activation(self, act: Act) -> None:
        self.mail.receive_activation(act, self.kinds[act.micro_batch])

    def _send_gradient(self, act: Act) -> None:
        if (gradient := self.gradients.pop((act.stage - 1, act.micro_batch), None)) is not None:
            self.mail.send_gradient(act, gradient)

    def _receive_gradient(self, act: Act) -> None:
        if (form := self.passes[act.stage, act.micro_batch].output) and form.needs_grad:
            self.mail.receive_gradient(act, form)

    def _gradient(self, act: Act) -> Tensor:
        """Of what the stage has made: the loss, or the next stage's input."""
        if self.stages[act.stage].last:
            assert self.scale is not None
            return self.scale(act.micro_batch).to(self.ends[act.micro_batch].dtype)
        place = act.stage, act.micro_batch
        self.recorder.waits()
        gradient = self.gradients.pop(place) if place in self.gradients else self.mail.take_gradient(act)
        self.recorder.arrived()
        return gradient


_PERFORM: dict[Op, Callable[[Running, Act], None]] = {
    Op.FORWARD: Running._forward,
    Op.BACKWARD: Running._backward,
    Op.INPUT_GRADIENT: Running._input_gradient,
    Op.WEIGHT_GRADIENT: Running._weight_gradient,
    Op.SEND_ACTIVATION: Running._send_activation,
    Op.RECEIVE_ACTIVATION: Running._receive_activation,
    Op.SEND_GRADIENT: Running._send_gradient,
    Op.RECEIVE_GRADIENT: Running._receive_gradient,
    Op.DROP_ACTIVATION: lambda run, act: run.mail.drop(act),
    Op.DROP_GRADIENT: lambda run, act: run.mail.drop(act),
    Op.REDUCE: lambda run, act: run.handlers.reduce(act.stage, act.micro_batch),
    Op.NORM: lambda run, act: run.handlers.norm(act.micro_batch),
    Op.UPDATE: lambda run, act: run.handlers.update(act.micro_batch),
    Op.BEGIN: _nothing,
    Op.DRAIN: _nothing,
}


def _shifted(act: Act, first: int) -> Act:
    """An action by the number of its micro-batch since the beginning."""
    return Act(act.op, act.stage, act.micro_batch + first, act.peer) if first else act


def _device(batches: Sequence[Batch]) -> torch.device:
    return next(iter(batches[0].values())).device
