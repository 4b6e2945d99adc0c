"""Two ranks: Shoal's data parallelism beside PyTorch's DistributedDataParallel, on the same process group."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.pairs import OPTIMIZER, SHOAL, Case, Outcome, Step, micro_batches, peer_adamw, peer_model, shoal, take_turns
from shoal.comm.world import World
from shoal.data.batches import Batch
from shoal.layout import Layout
from shoal.model.loss import IGNORED

PEERS = ("DDP", "DDP, bucket views")


def run(world: World, case: Case, realtime: bool) -> Outcome:
    """All three, in turn, in these processes."""
    trainers = {
        SHOAL: shoal(case, Layout(dp=world.size, mb=case.mb), world),
        "DDP": ddp(case, world, views=False),
        "DDP, bucket views": ddp(case, world, views=True),
    }
    return take_turns(world, case, trainers, realtime)


def ddp(case: Case, world: World, *, views: bool) -> Step:
    """DDP as a careful person uses it: exact mean over the positions of all ranks, traffic only in the last
    micro-batch, and the count agreed on while the first forward pass runs."""
    model = peer_model(case)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = peer_adamw(model)
    parameters = list(model.parameters())

    def step(batch: Batch) -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        counted = (batch["labels"] != IGNORED).sum().float()
        agreed = dist.all_reduce(counted, async_op=True)
        losses = []
        for number, part in enumerate(micro_batches(batch, case.mb), 1):
            with nullcontext() if number == case.mb else wrapped.no_sync():
                loss = wrapped(part, model.context(part))
                if number == 1:
                    agreed.wait()
                # DDP divides by the number of ranks, which the mean over positions must not.
                (loss * (world.size / counted)).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip)
        optimizer.step()
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
        return (total / counted).item(), norm.item()

    return step
