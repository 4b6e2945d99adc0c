"""Replicas: PyTorch's DistributedDataParallel, on the world's process group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.trainers import Case, Step, peer_adamw, peer_model, training_loop
from shoal.comm.world import World


def ddp(
    case: Case,
    world: World,
    *,
    views: bool,
    adamw: Callable[[nn.Module], torch.optim.Optimizer] = peer_adamw,
) -> Step:
    """DDP with traffic only in the last micro-batch."""
    model = peer_model(case)
    optimizer = adamw(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    return training_loop(
        case,
        model,
        optimizer,
        wrapped=wrapped,
        replicas=world.size,
        exchange=lambda last: nullcontext() if last else wrapped.no_sync(),
    )


PEERS = {"DDP": partial(ddp, views=False), "DDP, bucket views": partial(ddp, views=True)}
