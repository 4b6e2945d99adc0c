"""DTensor on a two-dimensional mesh ``row`` × ``col``: the peers of :mod:`bench.grid`.

Two ways to use such a mesh. :func:`grid` divides every weight, and the stream between modules, over both axes: samples
by ``row``, features by ``col``. :func:`replicas` divides samples and, as FSDP2 does, weights by ``row``, and weights
once more, as Megatron does, by ``col``: what PyTorch's tutorials make of such a mesh.

Each rank reads the samples of its row. Only what has to move is a DTensor: attention, activations and residual sums run
on local tensors, as they do under ``parallelize_module``, for an operation on DTensors costs several times as much.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from bench.tensor import DividedFused, DividedHead
from bench.trainers import Case, Step, peer_adamw, peer_model, training_loop
from shoal.comm.world import World
from shoal.data.batches import Batch
from shoal.model.context import Context
from shoal.model.decoder import Block, Head
from shoal.model.loss import IGNORED

Placements = tuple[Placement, Placement]

STREAM: Placements = (Shard(0), Shard(2))
"""Of [samples, positions, features] between modules."""
WHOLE_ROWS: Placements = (Shard(0), Replicate())
"""Of what has all features: the input of a linear that is divided by its output."""
TERMS: Placements = (Shard(0), Partial())
"""Of the terms of a sum over ``col``."""
BY_OUTPUT: tuple[Placements, Placements] = ((Shard(1), Shard(0)), (Replicate(), Shard(0)))
"""Of a weight [out, in]: where it is kept and where it is used."""
BY_INPUT: tuple[Placements, Placements] = ((Shard(0), Shard(1)), (Replicate(), Shard(1)))


def grid(case: Case, world: World, *, columns: int, sums: bool) -> Step:
    """Weights and stream divided over both axes.

    Every linear gathers its weight over ``row`` and its input over ``col``: SUMMA in one step. With ``sums`` the second
    linear of a pair (after attention, and down) takes its input as it lies and sums its output over ``col`` instead,
    which moves fewer words. Which of the two it is, is said by explicit redistribution: left to itself, the propagation
    of placements exchanges whichever operand is cheaper at the moment.
    """
    model = peer_model(case)
    mesh = _mesh(world, columns)
    second = BY_INPUT if sums else BY_OUTPUT
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn_norm, block.ffn_norm = GridNorm(block.attn_norm, mesh), GridNorm(block.ffn_norm, mesh)
        for owner, name in ((block.attn, "qkv"), (block.ffn, "gate_up")):
            divided = DividedFused(getattr(owner, name), columns)
            divided.linear = GridLinear(divided.linear.weight, mesh, BY_OUTPUT)
            setattr(owner, name, divided)
        block.attn.out = GridLinear(block.attn.out.weight, mesh, second)
        block.ffn.down = GridLinear(block.ffn.down.weight, mesh, second)
    tied = model.head.out.weight is model.embed.table.weight
    model.embed.table = GridEmbedding(model.embed.table.weight, mesh)
    model.head = GridHead(model.head, mesh)
    if tied:
        model.head.weight = model.embed.table.weight
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_complete)
    # Each of the columns counts the positions of its row, and the sum over all ranks counts them as often.
    loop = training_loop(case, model, peer_adamw(model), replicas=columns)
    return _of_row(loop, mesh)


def replicas(case: Case, world: World, *, columns: int) -> Step:
    """FSDP2 over ``row``, and over ``col`` the usual plan of tensor parallelism with the stream divided by positions.

    Parameters stay gathered from forward to backward, as a step of one micro-batch wants them.
    """
    model = peer_model(case)
    mesh = _mesh(world, columns)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.qkv = DividedFused(block.attn.qkv, columns)  # type: ignore[assignment]
        block.ffn.gate_up = DividedFused(block.ffn.gate_up, columns)  # type: ignore[assignment]
    model.head = DividedHead(model.head)  # type: ignore[assignment]
    entry = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {
        "embed.table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.attn_norm": SequenceParallel(use_local_output=True),
        "blocks.*.attn.qkv": entry,
        "blocks.*.attn.qkv.linear": ColwiseParallel(),
        "blocks.*.attn.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.ffn_norm": SequenceParallel(use_local_output=True),
        "blocks.*.ffn.gate_up": entry,
        "blocks.*.ffn.gate_up.linear": ColwiseParallel(),
        "blocks.*.ffn.down": RowwiseParallel(output_layouts=Shard(1)),
        "head.norm": SequenceParallel(),
        "head.out": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh["col"], plan)
    if case.shape.tied:
        model.head.out.weight = model.embed.table.weight
    model.register_forward_hook(lambda module, inputs, loss: loss.clone())  # FSDP2 warns of a view
    for block in model.blocks:
        fully_shard(block, mesh=mesh["row"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["row"], reshard_after_forward=False)
    loop = training_loop(case, model, peer_adamw(model), replicas=world.size)
    return _of_row(loop, mesh)


class GridLinear(nn.Module):
    """A linear without bias, from this rank's [samples/rows, positions, in/columns] to [..., out/columns].

    Its weight is gathered over ``row``. Over ``col`` the inputs are gathered where the weight's output is divided, and
    the outputs summed where its input is. Gradients go the same ways back.
    """

    def __init__(self, weight: Tensor, mesh: DeviceMesh, placements: tuple[Placements, Placements]) -> None:
        super().__init__()
        kept, self.used = placements
        self.weight = _divided(weight, mesh, kept)

    def forward(self, x: Tensor) -> Tensor:
        stream = DTensor.from_local(x, self.weight.device_mesh, STREAM, run_check=False)
        if self.used == BY_OUTPUT[1]:
            stream = stream.redistribute(placements=WHOLE_ROWS)
        y = F.linear(stream, self.weight.redistribute(placements=self.used))
        return y.redistribute(placements=STREAM).to_local()


class GridNorm(nn.Module):
    """An RMS norm of the stream, of whose rows the sums of squares alone have to move."""

    def __init__(self, norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__()
        self.width, self.eps = norm.weight.numel(), norm.eps
        self.weight = _divided(norm.weight, mesh, (Replicate(), Shard(0)))

    def forward(self, x: Tensor) -> Tensor:
        mesh = self.weight.device_mesh
        squares = DTensor.from_local(x.square().sum(-1, keepdim=True), mesh, TERMS, run_check=False)
        square = squares.redistribute(placements=WHOLE_ROWS).to_local(grad_placements=TERMS)
        weight = self.weight.to_local(grad_placements=(Partial(), Shard(0)))
        return x * torch.rsqrt(square / self.width + self.eps) * weight


class GridEmbedding(nn.Module):
    """Tokens [samples/rows, positions] to the stream; rows of the table divided over ``col``, columns over ``row``."""

    def __init__(self, table: Tensor, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = _divided(table, mesh, BY_OUTPUT[0])

    def forward(self, tokens: Tensor) -> Tensor:
        mesh = self.weight.device_mesh
        table = self.weight.redistribute(placements=BY_OUTPUT[1]).to_local(grad_placements=(Partial(), Shard(0)))
        row = tokens - mesh.get_local_rank("col") * len(table)
        mine = (row >= 0) & (row < len(table))
        found = F.embedding(row.where(mine, 0), table) * mine[..., None]
        return DTensor.from_local(found, mesh, TERMS, run_check=False).redistribute(placements=STREAM).to_local()


class GridHead(nn.Module):
    """The stream and labels [samples/rows, positions] to the summed loss of this row; logits are divided by samples
    over ``row`` and by words of the vocabulary over ``col``, and so is their cross-entropy."""

    def __init__(self, head: Head, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm = GridNorm(head.norm, mesh)
        self.weight = _divided(head.out.weight, mesh, BY_OUTPUT[0])

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        assert ctx.labels is not None
        mesh = self.weight.device_mesh
        stream = DTensor.from_local(self.norm(x), mesh, STREAM, run_check=False)
        weight = self.weight.redistribute(placements=BY_OUTPUT[1])
        logits = F.linear(stream.redistribute(placements=WHOLE_ROWS), weight).flatten(0, 1)
        labels = DTensor.from_local(ctx.labels.flatten(), mesh, WHOLE_ROWS, run_check=False)
        total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return total.to_local(grad_placements=(Replicate(), Replicate()))


def _mesh(world: World, columns: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (world.size // columns, columns), mesh_dim_names=("row", "col"))
    mesh._flatten("all")  # has no public name; a sum over both axes is one collective then
    return mesh


def _divided(weight: Tensor, mesh: DeviceMesh, placements: Placements) -> nn.Parameter:
    """What this rank has of a weight that is the same on all ranks."""
    return nn.Parameter(distribute_tensor(weight.detach(), mesh, placements, src_data_rank=None))


def _complete(parameter: Tensor) -> None:
    """Where the propagation left terms of a sum as the gradient, that sum; once, and not at every use."""
    if parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def _of_row(loop: Step, mesh: DeviceMesh) -> Step:
    """The step of a trainer whose rows divide the samples of a batch that every rank is given."""
    rows, row = mesh["row"].size(), mesh.get_local_rank("row")

    def step(batch: Batch) -> tuple[float, float]:
        with loss_parallel():
            return loop({name: x.chunk(rows)[row] for name, x in batch.items()})

    return step
