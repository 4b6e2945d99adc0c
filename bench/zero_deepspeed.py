"""Sharded data parallelism: DeepSpeed's ZeRO, where it is installed (``pip install '.[bench]'``).

It joins the process group that is there, so neither its launcher nor MPI is needed. Where there is a compiler it builds
a small extension when it is first used.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from bench.trainers import OPTIMIZER, Case, Peer, Step, micro_batches, peer_adamw, peer_model
from shoal.comm.world import World
from shoal.data.batches import Batch
from shoal.model.loss import IGNORED

INSTALLED = find_spec("deepspeed") is not None
BUCKET = 5_000_000
"""Elements that are reduced or gathered at a time. The default is all at once, which is slower here: 1.1 times the step
of the smallest size."""


def load() -> Any:
    """The module, quiet and on the CPU. Who imports it before forking has it in every process at once."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*is deprecated")
    import deepspeed

    return deepspeed


def deepspeed_zero(case: Case, world: World, *, stage: int) -> Step:
    """DeepSpeed's engine over PyTorch's fused AdamW: it divides the states, clips, and decides when to communicate."""
    deepspeed = load()
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    model = peer_model(case)
    settings = {
        "train_micro_batch_size_per_gpu": case.samples // case.mb,
        "gradient_accumulation_steps": case.mb,
        "gradient_clipping": OPTIMIZER.clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET},
        "steps_per_print": 1 << 30,
    }
    with redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        engine, *_ = deepspeed.initialize(model=model, optimizer=peer_adamw(model), config=settings)

    def step(batch: Batch) -> tuple[float, float]:
        counted = (batch["labels"] != IGNORED).sum().float()
        agreed = dist.all_reduce(counted, async_op=True)
        losses = []
        for number, part in enumerate(micro_batches(batch, case.mb), 1):
            loss = engine(part, model.context(part))
            if number == 1:
                agreed.wait()
            # It averages over replicas and micro-batches, which the mean over positions must not.
            engine.backward(loss * (world.size * case.mb / counted))
            engine.step()
            losses.append(loss.detach())
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
        return (total / counted).item(), float(engine.get_global_grad_norm())

    return step


def peers(stage: int) -> dict[str, Peer]:
    """What it is called in tables, and how it is made."""
    return {f"DeepSpeed ZeRO-{stage}": partial(deepspeed_zero, stage=stage)}
