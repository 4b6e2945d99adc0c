"""The trainers that take turns: Shoal's engine, and the loop of plain PyTorch that most peers are wrapped in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shoal.comm.world import World
from shoal.config import Model, Optimizer
from shoal.data.batches import Batch
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.model.decoder import Decoder
from shoal.model.loss import IGNORED
from shoal.train.setup import materialise_alone

SEED = 0
OPTIMIZER = Optimizer(lr=3e-4, clip=0.1)
"""AdamW; the limit is so low that clipping acts in every step, for every trainer."""

Step = Callable[[Batch], tuple[float, float]]
"""One optimizer step over this rank's samples: the mean loss over all ranks, and the norm before clipping."""


@dataclass(frozen=True)
class Case:
    """One size of the problem: ``samples`` of ``seq_len`` tokens a rank and step, in ``mb`` micro-batches.

    Replicas divide the samples of a step; ranks that share one replica of the model all read them all.
    """

    shape: Model
    samples: int
    seq_len: int
    mb: int = 1
    pairs: int = 15

    def __str__(self) -> str:
        tokens = self.samples * self.seq_len
        return f"{self.parameters / 1e6:.1f} M, {tokens:,} tokens a rank, mb={self.mb}"

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in Decoder(self.shape).parameters())


Peer = Callable[[Case, World], Step]
"""Makes a peer on this rank. It may use the default process group, which is there by then."""


def shoal(case: Case, layout: Layout, world: World) -> Step:
    """Shoal's engine on this rank."""
    with torch.device("meta"):
        model = Decoder(case.shape)
    engine = Engine(model, layout, optimizer=OPTIMIZER, seed=SEED, world=world)

    def step(batch: Batch) -> tuple[float, float]:
        result = engine.step(batch)
        engine.drain()  # what is still on its way is a part of the step
        return result.loss, result.grad_norm

    return step


def peer_model(case: Case) -> Decoder:
    """The same model with the same initial weights, whole, without an engine."""
    with torch.device("meta"):
        model = Decoder(case.shape)
    materialise_alone(model, SEED)
    return model


def peer_adamw(
    model: nn.Module, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> torch.optim.Optimizer:
    """PyTorch's fused AdamW with the same settings: matrices decay, vectors do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return make(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True)


def training_loop(
    case: Case,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    *,
    wrapped: nn.Module | None = None,
    replicas: int = 1,
    exchange: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext(),
    shares: Callable[[], Iterable[nn.Parameter]] | None = None,
) -> Step:
    """Forward, backward, clip, update, as a careful person writes it: the loss is the mean over all positions that
    count, micro-batches and replicas together.

    ``wrapped`` is the model as it is called, if that is another module. Over several ``replicas`` it averages the
    gradients: in the micro-batch, the last one, that runs under ``exchange(True)``. How many positions count is agreed
    on while the first forward pass runs. ``shares`` gives what the optimizer updates, with its gradients, where that is
    not all of ``model``.
    """
    call = wrapped or model
    parameters = list(model.parameters())

    def step(batch: Batch) -> tuple[float, float]:
        for parameter in parameters:
            parameter.grad = None
        counted = (batch["labels"] != IGNORED).sum().float()
        agreed = dist.all_reduce(counted, async_op=True) if replicas > 1 else None
        losses = []
        for number, part in enumerate(micro_batches(batch, case.mb), 1):
            with exchange(number == case.mb):
                loss = call(part, model.context(part))
                if agreed is not None and number == 1:
                    agreed.wait()
                # The average divides by the number of replicas, which the mean over positions must not.
                (loss * (replicas / counted)).backward()
            losses.append(loss.detach())
        norm = clip(shares() if shares else parameters)
        optimizer.step()
        total = torch.stack(losses).sum()
        if replicas > 1:
            dist.all_reduce(total)
        return (total / counted).item(), norm.item()

    return step


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """The samples of a batch divided over ``count`` micro-batches, in order."""
    size = len(batch["tokens"]) // count
    return [{name: x[i * size : (i + 1) * size] for name, x in batch.items()} for i in range(count)]


def clip(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Clip the gradients by their global norm, and return what it was. Sharded and whole ones do not mix in a call."""
    parameters = list(parameters)
    kinds = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    kinds = [kind for kind in kinds if kind]
    norms = [get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms])
    )
    for kind in kinds:
        clip_grads_with_norm_(kind, OPTIMIZER.clip, norm)
    return norm
