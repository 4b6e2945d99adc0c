"""One process: Shoal's engine beside the training loop that a person writes in plain PyTorch."""

from __future__ import annotations

from bench.trainers import Case, Step, peer_adamw, peer_model, training_loop
from shoal.comm.world import World


def plain(case: Case, world: World) -> Step:
    """The loop alone."""
    model = peer_model(case)
    return training_loop(case, model, peer_adamw(model))


PEERS = {"plain PyTorch": plain}
