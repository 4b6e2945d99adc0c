"""A model under a layout: build it, step it, evaluate it, save and load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal import checkpoint
from shoal.comm.collectives import all_reduce, broadcast, start_all_reduce
from shoal.comm.world import Group, World
from shoal.config import Optimizer
from shoal.data_parallel.allreduce import AllReduce
from shoal.data_parallel.buckets import Bucket, build_buckets
from shoal.data_parallel.buffers import average, copy_from_first
from shoal.errors import ConfigError, Diverged, LayoutError, setting
from shoal.layout import Layout
from shoal.local import buffer_fragments, lay_out, materialise, persistent_buffers
from shoal.mesh import Mesh
from shoal.model.context import Batch
from shoal.model.task import PlainTask, Task
from shoal.optim.clip import clip_factor, global_norm, squared_norm
from shoal.optim.optimizers import Run, Updater, state_names
from shoal.pipeline.executor import Executor, Handlers, Stage
from shoal.pipeline.program import faults
from shoal.pipeline.schedules import single
from shoal.placement import Fragment
from shoal.tensor import whole as whole_tensors

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class StepResult:
    """One finished optimizer step.

    ``loss`` is the mean over the ``weight`` positions (or samples) of the whole step, all ranks together;
    ``grad_norm`` that of all gradients before clipping; ``lr`` the rate that was applied.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    weight: float


class Engine:
    """Trains a model under a layout.

    ``model`` answers as a :class:`~shoal.model.task.Task` does (Shoal's decoder, built on the meta device so that
    weights come into being only where they are held), or is any ``nn.Module``, taken as it is, with
    ``loss(output, batch)`` that sums over samples and, if the mean is not over samples, ``weight(batch)``; its
    parameters are then copied from rank 0. ``rate(step)`` scales the learning rate.

    Raises :class:`LayoutError` where the layout is not built yet or does not fit the world.
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
    ) -> None:
        self.world = world or World()
        self.layout = layout.fill(self.world.size)
        self.layout.check_built()
        self.mesh = Mesh(self.layout.axes, self.world)
        self.optimizer, self.rate, self.seed = optimizer or Optimizer(), rate, seed
        self.task = _as_task(model, loss, weight)
        self.steps_done = 0
        self.on_gradients: Callable[[], None] = lambda: None
        """Called when gradients are reduced and not yet clipped: the moment at which they can be compared."""
        self._apply()

    def _apply(self) -> None:
        """Apply the layout to the model. The order matters, and here is where it is written."""
        module, roles, layers = self.task.module, self.task.roles, self.task.layers()
        grid, coords = self.mesh.grid, self.mesh.coords
        # Cut into pipeline stages: one, which holds every layer.
        stages = {0: Stage(tuple((unit, layer) for unit, (_, layer) in enumerate(layers)))}
        # Place, and materialise what is on the meta device by its placement.
        parameters = lay_out(module, layers, roles, whole_tensors.place, grid, coords)
        parameters = materialise(module, parameters, self.seed, self.world.device)
        module.to(self.world.device)
        # Shard: who reduces with whom, in which buckets.
        trained = [one for one in parameters if one.parameter.requires_grad]
        self._frozen = [one for one in parameters if not one.parameter.requires_grad]
        self.mesh.open_groups({who.summing for one in trained for who in one.holders} | {self.mesh.ranks_over("dp")})
        self._replicas = self.mesh.over("dp")
        self.buckets = build_buckets(trained, state_names(self.optimizer))
        self._copy_from_first()
        self._norm_group = self._fewest_for_the_norm()
        self._squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        self._sync = AllReduce(self.buckets, self.mesh.group, self._square)
        self._updater = Updater(self.optimizer, [run for bucket in self.buckets for run in _runs(bucket)])
        # The Program, and what its actions mean.
        self.program = single.accumulate(self.layout.mb)
        assert not (found := faults(self.program)), found
        handlers = Handlers(
            unit_done=self._sync.unit_done,
            reduce=lambda stage: self._sync.reduce(),
            norm=self._norm,
            update=self._update,
        )
        self._executor = Executor(self.task, stages, handlers)

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step over this data-parallel rank's samples of the whole step (dim 0 of every tensor).

        They are divided over the layout's micro-batches in order; :class:`LayoutError` when they cannot be.
        """
        batches = self._micro_batches(batch)
        self._check_frozen()
        self._sync.begin()
        self._squares.zero_()
        weight = self._weight(batches)
        agreed = start_all_reduce(weight, self._replicas, "weight")

        def scale() -> Tensor:
            agreed.wait()
            return torch.where(weight > 0, 1.0 / weight, 0.0)

        context = partial(self.task.context, seed=self.seed, step=self.steps_done, train=True)
        with torch.enable_grad():
            loss = self._executor.train(self.program, batches, context, scale).double()
        agreed.wait()  # a rank without a gradient of its own has not asked for the scale
        all_reduce(loss, self._replicas, "loss")
        average((buffer for _, buffer in persistent_buffers(self.task.module)), self._replicas)
        self.steps_done += 1
        counted = weight.item()
        mean = loss.item() / counted if counted else 0.0
        return StepResult(self.steps_done, mean, self._grad_norm, self._lr, counted)

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """(summed loss, weight) over the samples of all ranks, without training; batches add up before dividing."""
        self.drain()
        batches = self._micro_batches(batch)
        with _evaluating(self.task.module):
            loss = self._executor.evaluate(single.forward_only(self.layout.mb), batches, self.task.context)
        both = torch.stack([loss.double(), self._weight(batches)])
        all_reduce(both, self._replicas, "evaluation")
        summed, counted = both.tolist()
        return summed, counted

    def drain(self) -> None:
        """Finish what is in flight: nothing, under a schedule that ends each step with its update."""

    def save(self, folder: Path, meta: Mapping[str, Any] | None = None, *, keep: int | None = None) -> Path:
        """Write weights and optimizer states as a new checkpoint below ``folder``; returns its path.

        ``meta`` is kept with it, as JSON. The checkpoint knows no layout: any other can load it. With ``keep``, only
        that many of the newest remain.
        """
        self.drain()
        return checkpoint.save(folder, self.steps_done, self.fragments(), meta or {}, self.world, keep)

    def load(self, path: Path, *, states: bool = True) -> dict[str, Any]:
        """Read a checkpoint into what this rank holds; returns the ``meta`` that was saved with it.

        Without ``states`` only weights and buffers are read, and training starts at step 0 with fresh optimizer states.
        Raises :class:`CheckpointError` when the checkpoint is damaged or belongs to another model.
        """
        self.drain()
        wanted = [one for one in self.fragments() if states or one.kind == "weight"]
        step, meta = checkpoint.load(path, wanted, self.world)
        if not states:
            for bucket in self.buckets:
                for flat in bucket.states.values():
                    flat.zero_()
        self.steps_done = step if states else 0
        self._updater.set_steps(self.steps_done)
        return meta

    def fragments(self) -> list[Fragment]:
        """What this rank holds of every weight, buffer and optimizer state."""
        found = buffer_fragments(self.task.module, range(self.world.size))
        for one in self._frozen:
            found += one.fragments("weight", one.parameter.detach())
        for bucket in self.buckets:
            for kind, flat in {"weight": bucket.params, **bucket.states}.items():
                for slot in bucket.slots:
                    found += slot.held.fragments(kind, bucket.view(flat, slot))
        return found

    def gradients(self) -> list[Fragment]:
        """What this rank holds of every gradient: meaningful while ``on_gradients`` runs."""
        return [
            fragment
            for bucket in self.buckets
            for slot in bucket.slots
            for fragment in slot.held.fragments("gradient", bucket.grad(slot))
        ]

    def _square(self, bucket: Bucket) -> None:
        """Add a bucket's share to the squared gradient norm: where the norm takes several ranks, each element counts
        as one part of its copies."""
        alone = self._norm_group.size == 1
        for start, stop, who in bucket.ranges:
            self._squares += squared_norm(bucket.grads[start:stop]) / (1 if alone else len(who.copies))

    def _norm(self) -> None:
        self._sync.finish()
        self.on_gradients()
        self._grad_norm = global_norm(self._squares, self._norm_group)

    def _update(self) -> None:
        for bucket in self.buckets:
            bucket.check_views()
        if not isfinite(self._grad_norm):  # known to all ranks alike, and nothing has been updated
            raise Diverged(
                f"step {self.steps_done + 1}: the gradient norm is {self._grad_norm}; nothing was updated. Go on from "
                f"the last checkpoint with a lower optimizer.lr (it is {self.optimizer.lr}) or a longer warm-up"
            )
        factor = clip_factor(self._grad_norm, self.optimizer.clip)
        self._lr = self._updater.update(self.rate(self.steps_done), factor)

    def _check_frozen(self) -> None:
        """Which parameters train was settled when the layout was applied."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if not slot.held.parameter.requires_grad:
                    raise ConfigError(
                        f"Engine: {slot.held.name} was frozen after the engine was made; freeze it before"
                    )
        for one in self._frozen:
            if one.parameter.requires_grad:
                raise ConfigError(f"Engine: {one.name} was unfrozen after the engine was made; unfreeze it before")

    def _fewest_for_the_norm(self) -> Group:
        """The ranks that must add up to know the norm: this one alone, if every rank holds every gradient."""
        everything = all(len(who.copies) == self.world.size for bucket in self.buckets for _, _, who in bucket.ranges)
        agreed = torch.tensor([everything], dtype=torch.int64, device=self.world.device)
        all_reduce(agreed, self.world.everyone, "start", "min")
        return self.mesh.over() if agreed.item() else self.world.everyone

    def _weight(self, batches: list[dict[str, Tensor]]) -> Tensor:
        weights = [torch.as_tensor(self.task.weight(one)) for one in batches]
        return torch.stack([weight.to(self.world.device, torch.float64) for weight in weights]).sum()

    def _micro_batches(self, batch: Batch) -> list[dict[str, Tensor]]:
        """The batch, on this rank's device, divided over the micro-batches."""
        sizes = {name: len(tensor) if tensor.ndim else 0 for name, tensor in batch.items()}
        if len(set(sizes.values())) != 1:
            raise ConfigError(
                f"Engine: the tensors of a batch must have one number of samples in dim 0; they have {sizes}"
            )
        samples, count = next(iter(sizes.values())), self.layout.mb
        if samples == 0 or samples % count:
            raise LayoutError(
                setting("layout.mb", count, f"does not divide the {samples} samples of this rank",
                        f"use one of {[n for n in range(1, samples + 1) if samples % n == 0]}")
            )  # fmt: skip
        here = {name: tensor.to(self.world.device) for name, tensor in batch.items()}
        size = samples // count
        return [{name: tensor[i * size : (i + 1) * size] for name, tensor in here.items()} for i in range(count)]

    def _copy_from_first(self) -> None:
        """Start all replicas from the weights and buffers of the first, where they did not come from the seed."""
        if not isinstance(self.task, PlainTask):
            return
        for bucket in self.buckets:
            for start, stop, who in bucket.ranges:
                broadcast(bucket.params[start:stop], self.mesh.group(who.copies), "start")
        copy_from_first((one.parameter.data for one in self._frozen), self._replicas)
        copy_from_first(self.task.module.buffers(), self._replicas)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode, then each of its modules as it was: a user may have frozen some of them."""
    before = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in before:
            one.training = training


def _runs(bucket: Bucket) -> list[Run]:
    """The parts of a bucket that the optimizer treats alike."""
    return [
        Run(
            bucket.params[start:stop],
            bucket.grads[start:stop],
            {name: flat[start:stop] for name, flat in bucket.states.items()},
            decay,
        )
        for start, stop, decay in bucket.decay_runs()
    ]


def _as_task(
    model: nn.Module | Task,
    loss: Callable[[Tensor, Batch], Tensor] | None,
    weight: Callable[[Batch], Tensor] | None,
) -> Task:
    if hasattr(model, "layers") and hasattr(model, "apply_layer"):
        return cast(Task, model)
    if loss is None:
        raise ConfigError(
            f"Engine: {type(model).__name__} needs a loss; pass loss=lambda output, batch: the loss summed over samples"
        )
    return PlainTask(cast(nn.Module, model), loss, weight)
