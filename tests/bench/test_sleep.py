from __future__ import annotations

import time

import pytest
import torch

from bench.nap import Naps, NapStage
from bench.sleep import CASES, EMPTY, FULL, PEER, SHOAL, Case, _ideal, main, measure
from shoal.pipeline.schedules import SCHEDULES
from shoal.train.pool import Pool

IDEALS_MS = {
    "gpipe": 660,
    "1f1b": 660,
    "interleaved": 570,
    "breadth-first": 570,
    "zb-h1": 540,
    "zb-v": 510,
    "dualpipe-v": 510,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_longest_path_is_that_of_the_schedule(case: Case) -> None:
    passes = SCHEDULES[case.name](4, FULL.micro_batches, case.chunks)
    assert 1e3 * _ideal(passes, case) == pytest.approx(IDEALS_MS[case.name])


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe-v"])
def test_both_engines_do_the_same_work_in_as_long_a_path(pool: Pool, name: str) -> None:
    """That losses and gradients agree, ``measure`` checks."""
    (case,) = (case for case in CASES if case.name == name)
    seen = pool.run(measure, case, EMPTY, 2, False)
    assert all(len(one.seconds[engine]) == 2 for one in seen for engine in (SHOAL, PEER))
    if (listed := seen[0].peer_passes) is not None:
        assert 1e3 * _ideal(listed, case) == pytest.approx(IDEALS_MS[name])


def test_a_weight_gradient_that_waits_naps_when_it_is_made() -> None:
    def grads(waits: bool) -> tuple[list[torch.Tensor], float]:
        stage = NapStage(Naps(0, 0, 0.02), seed=1)
        loss = stage(torch.ones(2, 3)).square().sum()
        stage.waiting = [] if waits else None
        began = time.monotonic()
        loss.backward()
        took = time.monotonic() - began
        for contribution in stage.waiting or ():
            contribution()
        return [parameter.grad for parameter in stage.parameters()], took

    at_once, took = grads(waits=False)
    later, _ = grads(waits=True)
    torch.testing.assert_close(later, at_once, rtol=0, atol=0)
    assert took >= 0.02


def test_a_schedule_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "fastest"])
    assert "fastest" in capsys.readouterr().err
