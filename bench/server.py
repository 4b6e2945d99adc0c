"""Parameter servers: beside Shoal's own all-reduce, which moves as many words between other ranks."""

from __future__ import annotations

from bench.trainers import Case, Step, shoal
from shoal.comm.world import World
from shoal.layout import Layout


def all_reduce(case: Case, world: World) -> Step:
    """As many replicas that agree by all-reduce."""
    return shoal(case, Layout(dp=world.size, mb=case.mb), world)


PEERS = {"Shoal's all-reduce": all_reduce}
