"""What shared memory itself works in is counted for what it is."""

from __future__ import annotations

import torch

from shoal.comm.collectives import all_reduce
from shoal.comm.world import World
from shoal.meter import Meter
from shoal.purposes import COMMUNICATION, OUTSIDE
from shoal.train.pool import Pool


def held(world: World) -> tuple[dict[str, int], int]:
    mine = torch.ones(1 << 20)
    with Meter() as meter:
        meter.label("mine", [mine])
        with meter.phase("sum"):
            all_reduce(mine, world.everyone, "gradients")
        assert bool((mine == world.size).all())
    return meter.peaks()["sum"], mine.nbytes


def test_what_others_lend_for_a_sum_is_communication(pool: Pool) -> None:
    for found, own in pool.run(held, ranks=2):
        assert found["mine"] == own
        assert 0 < found[COMMUNICATION] <= own
        assert OUTSIDE not in found
