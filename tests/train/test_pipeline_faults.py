"""A stage that raises or is killed in the middle of a step ends the whole run, and what is told says where."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from torch import Tensor
from whole_runs import Apart, alive, ended, events, make_store, sets, until, write_run

from shoal.data.batches import Batch
from shoal.engine import Engine, StepResult
from shoal.model.decoder import FeedForward

LINES = {"pp=4:1f1b,mb=8": "1", "pp=2:zb-v,mb=4": "[12]", "pp=2:pipedream,mb=4": "1"}
"""The stages of the second rank."""
PATIENCE_S = 10
"""In which the whole run ends after the fault."""
PASS = 5
"""Of those through a block of the second rank in the fourth step, the one in which it happens."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


def in_the_middle(fault: Callable[[], object], backward: bool) -> Callable[[], None]:
    """A plant of ``fault`` in a pass of rank 1, forward or on its way back, in the middle of the fourth step."""

    def plant() -> None:
        step, forward = Engine.step, FeedForward.forward
        calls = 0

        def counting(self: Engine, batch: Batch) -> StepResult | None:
            nonlocal calls
            calls = 1 if self.world.rank == 1 and self.steps_done == 3 else 0
            return step(self, batch)

        def faulty(self: FeedForward, x: Tensor) -> Tensor:
            nonlocal calls
            calls += calls > 0
            y = forward(self, x)
            if calls > PASS:
                y.register_hook(lambda _: fault()) if backward else fault()
            return y

        Engine.step = counting  # type: ignore[method-assign]
        FeedForward.forward = faulty  # type: ignore[method-assign]

    return plant


def raise_it() -> NoReturn:
    raise ValueError("planted")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def broken(line: str, fault: Callable[[], object], backward: bool, store: Path, folder: Path) -> str:
    """What a run tells that ends of a fault, within the patience."""
    count = int(line[3])
    arguments = ["train", write_run(folder, store), "--layout", line, *sets(model__layers=4, data__validation=0)]
    shoal = Apart(arguments, folder / "said", in_the_middle(fault, backward))
    with ended([shoal.pid, *(ranks := shoal.ranks(count))]):
        until(lambda: not all(map(alive, ranks)), 120)
        result = shoal.end(PATIENCE_S)
        assert not any(map(alive, ranks))
    assert result.code == 1
    assert [values["step"] for values in events(folder / "out" / "run", "step")] == list(range(1, 4))[: 3 - ASYNC[line]]
    return result.err


ASYNC = {line: 2 * ("pipedream" in line) for line in LINES}
"""Steps whose results are still to come."""


@pytest.mark.parity
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("line", LINES)
def test_a_stage_that_raises_ends_the_run_with_its_traceback(
    line: str, backward: bool, store: Path, tmp_path: Path
) -> None:
    told = broken(line, raise_it, backward, store, tmp_path)
    assert told.startswith("error: rank 1 raised:\nTraceback")
    assert told.count("Traceback") == 1
    assert "in raise_it" in told
    word = "forward" if not backward else "input-gradient" if "zb" in line else "backward"
    place = rf"ValueError: planted\nin the {word} pass of stage {LINES[line]}, micro-batch \d+\n"
    assert re.search(place, told), told
    assert ("in step 4, whose own micro-batches are number 12 to 15 since" in told) == ("pipedream" in line)


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[] if "pipedream" in line else pytest.mark.parity) for line in LINES]
)
def test_a_stage_that_is_killed_ends_the_run_and_others_say_where_that_left_them(
    line: str, store: Path, tmp_path: Path
) -> None:
    told = broken(line, die, False, store, tmp_path)
    assert told.startswith("error: rank 1 was killed by SIGKILL")
    assert "Traceback" not in told
    assert re.search(r"\nrank [023]: .*\b(in|while) .* of stage \d, micro-batch \d+", told), told
