"""Whether trainers do the same work: each beside plain PyTorch in one process, over all samples of a step."""

from __future__ import annotations

from dataclasses import replace

from bench.pairs import CHECKED, SHOAL, Contest, compare, read
from bench.single import plain
from bench.trainers import Case
from shoal.comm.world import World

ALONE = "plain PyTorch in one process"


def check(world: World, contest: Contest, case: Case) -> dict[str, float]:
    """The largest relative difference of a loss from that of :data:`ALONE`, for each peer, and for Shoal where it
    can run the layout.

    Raises :class:`TrainersDiffer`.
    """
    world.default_group()  # the peers', which Shoal needs not
    trainers = {name: make(case, world) for name, make in contest.peers.items()}
    if contest.built:
        trainers[SHOAL] = contest.shoal(case, world)
    alone = plain(replace(case, samples=case.samples * world.size), world)
    steps = [
        {ALONE: alone(everything)} | {name: step(part) for name, step in trainers.items()}
        for everything, part in zip(read(case, world.size, CHECKED), contest.batches(case, world, CHECKED), strict=True)
    ]
    return compare(ALONE, steps)
