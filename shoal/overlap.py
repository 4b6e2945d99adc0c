"""What steps are made of whose gradients meet newer weights: by an asynchronous schedule, or by servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from shoal.behind import Behind
from shoal.comm.world import Group
from shoal.config import Optimizer
from shoal.data_parallel.server import Server
from shoal.data_parallel.sync import Sync
from shoal.flow import Flow
from shoal.layout import Layout
from shoal.mesh import Mesh
from shoal.optim.guard import Guard
from shoal.optim.optimizers import Updater
from shoal.pipeline.executor import Executor, Running
from shoal.pipeline.program import Program
from shoal.pipeline.stream import Stream
from shoal.pipeline.weights import Place, Weights


def open_flow(
    layout: Layout,
    mesh: Mesh,
    module: nn.Module,
    executor: Executor,
    program: Program,
    sync: Sync,
    updating: tuple[Updater, Guard, Optimizer, Callable[[int], float]],
    *,
    replicas: Group,
    losses: Group,
    loss_axes: Sequence[str],
) -> Flow | Behind:
    """The steps of one rank: ``program`` is what one of them does, ``updating`` what applies gradients. Ranks that
    differ on ``loss_axes`` know parts of the loss."""
    if isinstance(sync, Server):
        return Behind(partial(executor.run, program), sync, *updating, layout, mesh, loss_axes)
    stream = Stream(layout.schedule, layout.pp, mesh.coords["pp"], layout.mb)
    memories = [(memory, [Place(*each) for each in places]) for memory, places in sync.buckets()]
    weights = Weights(module, memories, oldest=stream.oldest)
    stage = mesh.over("dp", "cp", *layout.tensor_names)

    def begin(scale: Callable[[int], Tensor]) -> Running:
        return executor.begin(stream.ways, mesh.world.device, scale, weights=weights)

    return Flow(stream, begin, sync, weights, *updating, stage=stage, replicas=replicas, losses=losses)
