from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_ranks import run_ranks

from shoal.checkpoint.agree import together
from shoal.comm.world import World
from shoal.errors import CheckpointError


def refusals(world: World, failing: tuple[int, ...], error: type[Exception]) -> str:
    def work() -> int:
        if world.rank in failing:
            raise error("no room")
        return world.rank

    with pytest.raises(CheckpointError) as caught:
        together(work, world, "cannot do it")
    assert isinstance(caught.value.__cause__, error if world.rank in failing else type(None))
    return str(caught.value)


def test_ranks_share_what_they_choose_or_raise_one_error(tmp_path: Path) -> None:
    def work(world: World) -> list[object]:
        return [
            together(lambda: world.rank, world, "cannot", share=lambda rank: {"square": rank**2}),
            refusals(world, (1, 2), OSError),
            refusals(world, (0, 1, 2), CheckpointError),
        ]

    squares = [{"square": 0}, {"square": 1}, {"square": 4}]
    one, all_alike = "rank 1: cannot do it: OSError: no room (1 more of 3 ranks failed)", "no room"
    assert run_ranks(3, work, tmp_path) == [[(rank, squares), one, all_alike] for rank in range(3)]


def test_what_cannot_be_shared_is_an_error_too() -> None:
    with pytest.raises(CheckpointError, match="cannot: TypeError"):
        together(lambda: 1, World(), "cannot", share=lambda result: {1, 2})
