"""Tensor parallelism: PyTorch's, by DTensor and parallelize_module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from bench.trainers import Case, Step, peer_adamw, peer_model, training_loop
from shoal.comm.world import World
from shoal.data.batches import Batch
from shoal.model.context import Context
from shoal.model.decoder import Block, Fused, Head
from shoal.model.loss import IGNORED


def dtensor(case: Case, world: World) -> Step:
    """Linears by columns, then by rows, so that each pair costs one all-reduce a pass; the vocabulary of embedding and
    head divided, and with it the logits and their cross-entropy. Norms are whole on every rank."""
    model = peer_model(case)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.qkv = DividedFused(block.attn.qkv, world.size)  # type: ignore[assignment]
        block.ffn.gate_up = DividedFused(block.ffn.gate_up, world.size)  # type: ignore[assignment]
    model.head = DividedHead(model.head)  # type: ignore[assignment]
    plan = {
        "embed.table": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attn.qkv.linear": ColwiseParallel(),
        "blocks.*.attn.out": RowwiseParallel(),
        "blocks.*.ffn.gate_up.linear": ColwiseParallel(),
        "blocks.*.ffn.down": RowwiseParallel(),
        "head.out": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(model, init_device_mesh("cpu", (world.size,)), plan)
    if case.shape.tied:
        model.head.out.weight = model.embed.table.weight
    loop = training_loop(case, model, peer_adamw(model))

    def step(batch: Batch) -> tuple[float, float]:
        with loss_parallel():
            return loop(batch)

    return step


class DividedFused(nn.Module):
    """A fused linear whose columns can be divided: each rank's rows of every part stand together."""

    def __init__(self, fused: Fused, ranks: int) -> None:
        super().__init__()
        self.parts = [width // ranks for width in fused.parts]
        self.linear = nn.Linear(fused.in_features, fused.out_features, bias=False, device="meta")
        shares = [part.chunk(ranks) for part in fused.weight.detach().split(list(fused.parts))]
        self.linear.weight = nn.Parameter(torch.cat([share for rank in zip(*shares, strict=True) for share in rank]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(self.linear(x), self.parts, dim=-1)


class DividedHead(nn.Module):
    """The head with the cross-entropy of PyTorch, which loss_parallel takes over logits of a divided vocabulary."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.norm, self.out = head.norm, head.out

    def forward(self, x_BTH: Tensor, ctx: Context) -> Tensor:
        assert ctx.labels is not None
        logits = self.out(self.norm(x_BTH)).flatten(0, 1)
        total = F.cross_entropy(logits, ctx.labels.flatten(), ignore_index=IGNORED, reduction="sum")
        assert isinstance(total, DTensor)
        return total.to_local()


PEERS = {"DTensor": dtensor}
