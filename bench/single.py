"""One process: Shoal's engine beside the training loop that a person writes in plain PyTorch."""

from __future__ import annotations

import torch

from bench.pairs import OPTIMIZER, SHOAL, Case, Outcome, Step, micro_batches, peer_adamw, peer_model, shoal, take_turns
from shoal.comm.world import World
from shoal.data.batches import Batch
from shoal.layout import Layout
from shoal.model.loss import IGNORED

PEERS = ("plain PyTorch",)


def run(world: World, case: Case, realtime: bool) -> Outcome:
    """Both, in turn, in this process."""
    trainers = {SHOAL: shoal(case, Layout(mb=case.mb), world), "plain PyTorch": plain(case)}
    return take_turns(world, case, trainers, realtime)


def plain(case: Case) -> Step:
    """Forward, backward, clip, update; the loss is the mean over all positions that count, micro-batches together."""
    model = peer_model(case)
    optimizer = peer_adamw(model)
    parameters = list(model.parameters())

    def step(batch: Batch) -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=True)
        counted = (batch["labels"] != IGNORED).sum()
        losses = []
        for part in micro_batches(batch, case.mb):
            loss = model(part, model.context(part)) / counted
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip)
        optimizer.step()
        return torch.stack(losses).sum().item(), norm.item()

    return step
