"""A model under a layout: build it, step it, evaluate it, save and load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal import checkpoint
from shoal.behind import Behind
from shoal.build import (
    check_optimizers,
    held_units,
    homes_of,
    part_of,
    passes_of,
    programs_of,
    runs_of,
    shares_of,
    stages_of,
    swap_of,
    sync_of,
)
from shoal.comm.collectives import all_reduce, broadcast, start_all_reduce
from shoal.comm.world import World
from shoal.config import Optimizer
from shoal.data_parallel.buffers import average, copy_from_first, put_back
from shoal.errors import ConfigError, Diverged
from shoal.feed import check_same, check_same_plan, loss_scale, micro_batches, weights_of
from shoal.flow import Flow, updates_by_layer, updates_of
from shoal.layout import Layout
from shoal.load import Loads, check_balance
from shoal.local import adapt, allot, buffer_fragments, drop, lay_out, persistent_buffers
from shoal.mesh import Mesh
from shoal.model.context import Batch, Cache
from shoal.model.decoder import Decoder
from shoal.model.generate import Decode
from shoal.model.task import Task, check_module, evaluating
from shoal.optim.clip import clip_factor
from shoal.optim.guard import Guard
from shoal.optim.optimizers import Updater
from shoal.optim.treatment import Treatments
from shoal.overlap import open_flow
from shoal.own import interpreter_for, task_of
from shoal.pipeline.executor import Executor, Handlers, Stage
from shoal.pipeline.lines import Lines
from shoal.pipeline.trace import Recorder
from shoal.placement import Fragment
from shoal.result import StepResult

_META, _UPDATES = "engine", "updates"
"""Where the engine keeps its own numbers among those that a checkpoint remembers."""


class Engine:
    """Trains a model under a layout.

    ``model`` answers as a :class:`~shoal.model.task.Task` does (Shoal's decoder, built on the meta device so that
    weights come into being only where they are held), or is any ``nn.Module``, taken as it is, with
    ``loss(output, batch)`` that sums over samples and, if the mean is not over samples, ``weight(batch)``; its
    parameters are then copied from rank 0, and an ``example`` batch lets ``tp`` and ``pp`` divide it. ``rate(step)``
    scales the learning rate. ``swap`` is the folder of what a layout's ``offload`` keeps on a disk; the current one
    unless told.

    Raises :class:`LayoutError` where the layout is not built yet, or does not fit the world or the model, and
    :class:`ConfigError` where the optimizer does not.
    """

    def __init__(
        self,
        model: nn.Module | Task,
        layout: Layout,
        *,
        optimizer: Optimizer | None = None,
        rate: Callable[[int], float] = lambda _: 1.0,
        seed: int = 0,
        world: World | None = None,
        loss: Callable[[Tensor, Batch], Tensor] | None = None,
        weight: Callable[[Batch], Tensor] | None = None,
        example: Batch | None = None,
        swap: Path | None = None,
    ) -> None:
        self.world = world or World()
        self.layout = layout.fill(self.world.size)
        self.layout.check_built()
        self._swap = swap_of(self.layout, swap or Path(), first=self.world.rank == 0)
        self.optimizer, self.rate, self.seed = optimizer or Optimizer(), rate, seed
        self.task = task_of(model, loss, weight, example, self.layout, self.world.device)
        check_module(self.task.module)
        self.steps_done = 0
        self._cut_short, self._samples_checked = False, False
        self._finished: list[StepResult] = []
        self.on_gradients: Callable[[], None] = lambda: None
        """Called when gradients are reduced and not yet clipped: the moment at which they can be compared."""
        self.overlap = False
        """Whether the parameters that ZeRO-1 and 2 gather, and servers hand out, may still be on their way when a step
        returns, until their next use in here, or :meth:`drain`. Those that are gathered are NaN meanwhile."""
        self.recorder = Recorder()
        """Writes down what this rank does, while it is told to."""
        self.mesh = Mesh(self.layout.axes, self.world)
        self._interpreter = interpreter_for(self.layout, self.task)
        self._part = part_of(self._interpreter, self.mesh.coords)
        self._open_groups()
        self._apply()

    def _open_groups(self) -> None:
        """The groups of ranks that work together otherwise than on a parameter."""
        mesh, tensor, apart = self.mesh, self.layout.tensor_names, self._interpreter.loss_axes
        axes = (("pp",), ("dp", "cp"), ("pp", "cp", *tensor), ("pp", "dp", "cp", *apart))
        mesh.open_groups({mesh.ranks_over(*names) for names in (*axes, apart, *((name,) for name in tensor))})
        self._pipeline, self._replicas, self._replica, self._losses = (mesh.over(*names) for names in axes)
        self._lines = Lines.over(lambda channel: mesh.over("pp", channel=channel))

    def _apply(self) -> None:
        """Apply the layout to the model. The order matters, and here is where it is written."""
        module, roles, layers, mesh = self.task.module, self.task.roles, self.task.layers(), self.mesh
        half = any(parameter.dtype == torch.float16 for parameter in module.parameters())
        self._guard = Guard(self.optimizer.skips, scaled=half)
        treat = Treatments(self.optimizer)
        treat.check(module, roles)
        check_optimizers(self.layout, treat.names)
        check_balance(self.layout, module)
        # What has values already has them from the first rank.
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.world.device))
        given = [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]
        copy_from_first(given, self.world.everyone)
        # Cut into pipeline stages.
        stages, homes, at = stages_of(self.layout, layers, roles), homes_of(self.layout), mesh.coords["pp"]
        shares = shares_of(self.layout, layers, roles, stages)
        check_same_plan(self.layout, passes_of(self.layout, shares), self.world.everyone, self.world.device)
        own = [stage for stage, home in enumerate(homes) if home == at]
        units_of = held_units(stages, homes)
        mine = units_of[at]
        used = {unit: list(layers[unit][1].parameters()) for unit in mine}
        # Place: what this rank has of each parameter, and the modules that compute with their part of it.
        interpreter = self._interpreter
        held = lay_out(module, layers, roles, interpreter, mesh.grid, mesh.coords, units_of)
        names = {one.parameter: one.name for one in held}
        for unit in set(range(len(layers))) - set(mine):
            drop(layers[unit][1], [layers[other][1] for other in mine])
        held = allot(module, held, self.seed, self.world.device)
        for unit in mine:
            adapt(*layers[unit], roles, interpreter, mesh)
        # Recompute, and offload activations.
        last = len(stages) - 1
        runs = runs_of(self.layout, self.task, interpreter, stages, own, self.world.device, self._swap)
        # Shard, and materialise by placement.
        uses = {unit: [names[parameter] for parameter in used[unit]] for unit in mine}
        masters = self.optimizer.rounding == "nearest"
        self._sync = sync_of(self.layout, held, treat, mesh, uses, masters=masters, swap=self._swap)
        self.on_host = self._sync.on_host
        self._updater = Updater(self.optimizer, self._sync.runs(), self.world, self.seed, self._sync.shelves())
        self._buffers = [buffer for _, buffer in persistent_buffers(module)]
        self._units, self._layers = mine, len(layers)
        # The Program, and what its actions mean.
        self._programs = programs_of(self.layout, at, shares)
        handlers = Handlers(
            must_see=self._sync.must_see,
            enter_unit=self._sync.enter_unit,
            leave_unit=self._sync.leave_unit,
            unit_done=self._sync.unit_done,
            postpone=self._sync.postpone,
            reduce=lambda stage, first: self._reduce(stages[stage], first),
            norm=self._norm,
            update=self._update,
        )
        found = [Stage(stage, stage == 0, stage == last, runs[stage]) for stage in own]
        self._executor = Executor(self.task, found, handlers, self._lines, self.recorder)
        self._last = homes[last]
        self._flow = self._open_flow() if self.layout.delayed else None
        self._loads = Loads(layers, mine, self.world.everyone, self.world.device)

    def _open_flow(self) -> Flow | Behind:
        updating = self._updater, self._guard, self.optimizer, self.rate
        return open_flow(
            self.layout, self.mesh, self.task.module, self._executor, self._programs.train, self._sync, updating,
            replicas=self._replicas, losses=self._losses, loss_axes=self._interpreter.loss_axes,
        )  # fmt: skip

    def step(self, batch: Batch) -> StepResult | None:
        """One optimizer step over this data-parallel rank's samples of the whole step (dim 0 of every tensor).

        They are divided over the layout's micro-batches in order; :class:`LayoutError` when they cannot be. All ranks
        of a replica (its stages, its context- and tensor-parallel ranks) are given the same samples. Returns the newest
        result: that of this step, or, under an asynchronous schedule, of the newest one that has finished, None before
        the first has. :meth:`finished` has them all.
        """
        batches = micro_batches(batch, self.layout.mb, self.world.device, self._part)
        self._check_whole()
        if not self._samples_checked:
            check_same(batch, self._replica, self.world.device)
            self._samples_checked = True
        self._sync.check(under_way=self._flow is not None and self._flow.under_way)
        if self._flow is not None:
            return self._begin_step(self._flow, batches)
        self._sync.begin()
        weight = weights_of(self.task, batches, self.world.device).sum()
        denominator = weight if self.layout.reduce == "mean" else weight.clone()
        agreed = start_all_reduce(weight, self._replicas, "weight")

        def scale(_: int) -> Tensor:
            agreed.wait()
            return loss_scale(denominator, self._guard.scale)

        contexts = self._loads.watch(self._contexts(seed=self.seed, step=self.steps_done, train=True))
        buffers = [buffer.clone() for buffer in self._buffers]
        try:
            with torch.enable_grad():
                loss = self._executor.run(self._programs.train, batches, contexts, scale)
        except BaseException as error:
            self._sync.release()
            put_back(self._buffers, buffers)
            self._cut_short = not isinstance(error, Diverged)
            raise
        agreed.wait()  # a rank without a gradient of its own has not asked for the scale
        all_reduce(loss, self._losses, "loss")
        if not self._updated:
            put_back(self._buffers, buffers)
        average(self._buffers, self._replicas)
        if not self.overlap:
            self._sync.settle()
        loads = self._loads.end(weight.item(), updated=self._updated)
        self.steps_done += 1
        mean = loss.item() / counted if (counted := weight.item()) else 0.0
        skipped = not self._updated
        result = StepResult(self.steps_done, mean, self._grad_norm, self._lr, counted, skipped, experts=loads)
        self._finished = [result]
        return result

    def _begin_step(self, flow: Flow | Behind, batches: list[Batch]) -> StepResult | None:
        contexts = self._contexts(seed=self.seed, step=self.steps_done, train=True)
        try:
            flow.step(self.steps_done, batches, weights_of(self.task, batches, self.world.device), contexts)
        except BaseException:
            self._cut_short = True
            raise
        finally:
            self._finished += (found := flow.finished())
        self.steps_done += 1
        return found[-1] if found else None

    def finished(self) -> list[StepResult]:
        """The results of the steps that have finished since this was last asked, in order."""
        found, self._finished = self._finished, []
        return found

    @property
    def skipped(self) -> int:
        """How many steps had gradients that were not finite, and updated nothing."""
        return self._guard.skipped

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """(summed loss, weight) over the samples of all ranks, without training; batches add up before dividing."""
        self.drain()
        batches = micro_batches(batch, self.layout.mb, self.world.device, self._part)
        with self._forward_only():
            loss = self._executor.run(self._programs.evaluate, batches, self._contexts())
        weight = weights_of(self.task, batches, self.world.device).sum()
        all_reduce(loss, self._losses, "evaluation")
        all_reduce(weight, self._replicas, "evaluation")
        return loss.item(), weight.item()

    def decoding(self) -> Decode:
        """Decodes one text, as :func:`shoal.model.generate.decoding` does, on all ranks alike."""
        task = self.task
        if not isinstance(task, Decoder):
            raise ConfigError(f"Engine: {type(task.module).__name__} cannot generate text; a Decoder can")
        self.drain()
        cache = Cache()

        def decode(tokens: list[int]) -> Tensor:
            batch = cache.following(torch.tensor([tokens], device=self.world.device))
            with self._forward_only():
                found = self._executor.outputs(self._programs.decode, [batch], self._contexts(cache=cache, newest=True))
            logits = found[0][0, 0] if found else next(task.parameters()).new_empty(task.shape.vocab)
            broadcast(logits, self._pipeline, "generation", source=self._last)
            return logits

        return decode

    def drain(self) -> None:
        """Finish what is in flight: under a schedule that ends each step with its update, parameters at most
        (:attr:`overlap`). What it finishes, :meth:`finished` tells. All ranks call it."""
        if (flow := self._flow) is None:
            self._sync.settle()
            return
        self._check_whole()
        if not flow.under_way:
            return
        self._sync.check(under_way=True)
        try:
            flow.drain()
        except BaseException:
            self._cut_short = True
            raise
        finally:
            self._finished += flow.finished()
        average(self._buffers, self._replicas)

    def save(self, folder: Path, meta: Mapping[str, Any] | None = None, *, keep: int | None = None) -> Path:
        """Write weights and optimizer states as a new checkpoint below ``folder``; returns its path.

        ``meta`` is kept with it, as JSON. The checkpoint knows no layout: any other can load it. With ``keep``, only
        that many of the newest remain.
        """
        self.drain()
        made = updates_by_layer(self._updater.updates, self._units, self._layers, self._pipeline, self.world.device)
        kept = {**(meta or {}), _META: {**self._guard.state(), _UPDATES: made}}
        return checkpoint.save(folder, self.steps_done, self.fragments(), kept, self.world, keep)

    def load(self, path: Path, *, states: bool = True) -> dict[str, Any]:
        """Read a checkpoint into what this rank holds; returns the ``meta`` that was saved with it.

        Without ``states`` only weights and buffers are read, and training starts at step 0 with fresh optimizer states.
        Raises :class:`CheckpointError` when the checkpoint is damaged or belongs to another model.
        """
        self.drain()
        wanted = [one for one in self.fragments() if states or one.kind == "weight"]
        step, meta = checkpoint.load(path, wanted, self.world)
        self._sync.published(fresh=True)
        self._sync.settle()
        if not states:
            for fragment in self._sync.states():
                fragment.tensor.zero_()
        own = meta.pop(_META, {})
        self.steps_done = step if states else 0
        self._guard.restore(own if states else {})
        made = updates_of(own.get(_UPDATES, self.steps_done - self.skipped), self._units)
        self._updater.set_steps(made if states else 0)
        return meta

    def fragments(self) -> list[Fragment]:
        """What this rank holds of every weight, buffer and optimizer state."""
        stage = self.mesh.ranks_over("dp", "cp", *self.layout.tensor_names)
        found = buffer_fragments(self.task.module, stage)
        return [*found, *self._sync.weights(), *self._sync.states()]

    def gradients(self) -> list[Fragment]:
        """What this rank holds of every gradient: meaningful while ``on_gradients`` runs. Under fp16 the loss scale is
        in them."""
        return list(self._sync.gradients())

    def _reduce(self, units: range, first: int) -> None:
        if self._flow is not None:
            self._flow.reduce(reversed(units), first)
        else:
            self._sync.reduce(reversed(units))

    def _norm(self, first: int) -> None:
        if self._flow is not None:
            self._flow.norm(first)
            return
        self._sync.finish()
        self.on_gradients()
        self._grad_norm = self._sync.norm.find() / self._guard.scale

    def _update(self, first: int) -> None:
        if self._flow is not None:
            self._flow.update(first)
            return
        clip = clip_factor(self._grad_norm, self.optimizer.clip) / self._guard.scale
        self._updated = self._guard.passes(self._grad_norm)
        if (end := self._guard.end(self.steps_done + 1, self._grad_norm, self.optimizer.lr)) is not None:
            raise end
        self._lr = self._updater.update(self.rate(self.steps_done), clip, self._sync.publish) if self._updated else 0.0
        self._sync.updated(ahead=True)

    def _contexts(self, **options: Any) -> Callable[[Batch], Any]:
        """Makes the context of a micro-batch, as far as it is this rank's."""
        return lambda batch: self._interpreter.localise(self.task.context(batch, **options), self.mesh.coords)

    @contextmanager
    def _forward_only(self) -> Iterator[None]:
        """The module in evaluation mode and without gradients."""
        self._check_whole()
        try:
            with torch.no_grad(), evaluating(self.task.module):
                yield
        finally:
            self._sync.release()

    def _check_whole(self) -> None:
        """What stages have sent each other in a step that was cut short would meet what the next one sends."""
        if self._cut_short and (self.layout.stages > 1 or self._flow is not None):
            raise ConfigError(
                f"Engine: the step after step {self.steps_done} was cut short by an error, and a pipeline cannot go on "
                "from the middle of a step; make a new engine, and load a checkpoint into it"
            )
