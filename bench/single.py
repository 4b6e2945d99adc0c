"""One process: Shoal's engine beside the training loop that a person writes in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from bench.trainers import Case, Step, peer_adamw, peer_model, training_loop
from shoal.comm.world import World


def plain(case: Case, world: World) -> Step:
    """The loop alone."""
    model = peer_model(case)
    return training_loop(case, model, peer_adamw(model))


def share(case: Case, world: World) -> Step:
    """The loop alone, but it clips and updates only one part of the model, of as many as there are ranks: what is left
    of ZeRO without communication."""
    model = peer_model(case)
    whole = list(model.parameters())

    def part(tensor: Tensor) -> Tensor:
        return tensor.tensor_split(world.size)[world.rank]

    own = nn.ParameterList([nn.Parameter(part(parameter.detach())) for parameter in whole])

    def shares() -> Iterable[nn.Parameter]:
        for mine, parameter in zip(own, whole, strict=True):
            assert parameter.grad is not None
            mine.grad = part(parameter.grad)
        return own

    return training_loop(case, model, peer_adamw(own), shares=shares)


PEERS = {"plain PyTorch": plain}
