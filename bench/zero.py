"""Sharded data parallelism: PyTorch's ZeroRedundancyOptimizer (optimizer states), and FSDP2 (gradients and parameters
too)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from bench.ddp import ddp
from bench.trainers import Case, Step, peer_adamw, peer_model, training_loop
from shoal.comm.world import World


def sharded_adamw(model: nn.Module, *, views: bool) -> torch.optim.Optimizer:
    """Each rank updates whole parameters, about its share of them, and broadcasts them: with ``views`` in buckets."""
    shared = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=views)
    return peer_adamw(model, shared)


def fsdp2(case: Case, world: World, *, reshard: bool, ahead: bool) -> Step:
    """FSDP2 over each block and the rest, with traffic for gradients only in the last micro-batch.

    With ``reshard``, a block's parameters are gathered for each forward and each backward pass and freed after it;
    those of the rest, which both ends of a pass need, for forward and backward together, as PyTorch advises. Without,
    all stay from their first use in a step to their last. ``ahead`` gathers the next block during the current one:
    FSDP2 does so by itself on a GPU, where streams run beside each other, and otherwise only if told.
    """
    model = peer_model(case)
    mesh = init_device_mesh("cpu", (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    sharded = fully_shard(model, mesh=mesh, reshard_after_forward=False)
    if ahead:
        sharded._set_unshard_async_op(True)  # it has no public name
        for unit, following in pairwise([sharded, *model.blocks]):
            unit.set_modules_to_forward_prefetch([following])

    def exchange(last: bool) -> AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(last)
        sharded.set_reshard_after_backward(last or reshard)
        return nullcontext()

    return training_loop(case, model, peer_adamw(model), replicas=world.size, exchange=exchange)


OPTIMIZER_STATES = {
    "ZeroRedundancyOptimizer": partial(ddp, views=True, adamw=partial(sharded_adamw, views=False)),
    "ZeroRedundancyOptimizer, bucket views": partial(ddp, views=True, adamw=partial(sharded_adamw, views=True)),
}
GRADIENTS = {
    "FSDP2, no reshard": partial(fsdp2, reshard=False, ahead=False),
    "FSDP2, no reshard, gathers ahead": partial(fsdp2, reshard=False, ahead=True),
}
PARAMETERS = {
    "FSDP2": partial(fsdp2, reshard=True, ahead=False),
    "FSDP2, gathers ahead": partial(fsdp2, reshard=True, ahead=True),
}
