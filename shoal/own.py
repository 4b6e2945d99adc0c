"""A user's own module under a layout: as it is where that will do, traced where the layout divides it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.build import interpreter_of
from shoal.errors import LayoutError, setting
from shoal.layout import Layout
from shoal.local import Interpreter, persistent_buffers
from shoal.model.context import Batch
from shoal.model.task import PlainTask, Task, as_task
from shoal.tensor.inferred import InferredOneD
from shoal.trace.task import TracedTask


def task_of(
    model: nn.Module | Task,
    loss: Callable[[Tensor, Batch], Tensor] | None,
    weight: Callable[[Batch], Tensor] | None,
    example: Batch | None,
    layout: Layout,
    device: torch.device,
) -> Task:
    """``model`` as a task: traced, where an ``example`` is given and the layout divides what it does not tell itself.

    Raises :class:`ConfigError` where it cannot be traced, and :class:`LayoutError` for what no traced module can do.
    """
    task = as_task(model, loss, weight)
    if (
        example is None
        or not isinstance(task, PlainTask)
        or (layout.tp == 1 and (layout.pp == 1 or task.runs_its_layers))
    ):
        return task
    if layout.recompute == "selective":
        problem = "a traced module does not tell where the core of attention is"
        raise LayoutError(setting("layout.recompute", layout.recompute, problem, "use recompute=full"))
    assert loss is not None
    traced = TracedTask(task.module, loss, weight, example=example, device=device, divided=layout.tp > 1)
    kept = {name for name, _ in persistent_buffers(task.module)} & set(traced.shared_buffers)
    if layout.pp > 1 and kept:
        problem = f"several layers read the buffer {min(kept)}, and each stage would save its own"
        raise LayoutError(setting("layout.pp", layout.pp, problem, "register it with persistent=False, or use pp=1"))
    return traced


def interpreter_for(layout: Layout, task: Task) -> Interpreter:
    """Who answers for the roles of ``task``: for inferred ones, who knows what they were inferred from."""
    if layout.tp == 1 or not isinstance(task, TracedTask):
        return interpreter_of(layout, task.roles)
    if layout.tp_kind != "1d":
        problem = "the stream of a traced module is not divided"
        raise LayoutError(setting("layout.tp", f"{layout.tp}:{layout.tp_kind}", problem, f"use tp={layout.tp}"))
    if layout.cp > 1:
        problem = "a traced module does not tell where the core of attention is"
        raise LayoutError(setting("layout.cp", layout.cp, problem, "use cp=1"))
    return InferredOneD(layout.tp, task.inferred)
