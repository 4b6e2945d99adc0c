from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from bench.collectives import (
    _HEAD,
    ANYWHERE,
    COPY,
    EXCHANGES,
    GLOO,
    KIB,
    LARGE,
    ZEROS,
    Row,
    _line,
    main,
    measure,
    rows_of,
)
from bench.pairs import Clocks, Outcome
from bench.realtime import scheduling
from shoal.train.pool import Pool

ROW = Row("all-reduce", 2, LARGE, ANYWHERE, 1.0, 4.0, 0.5, 1.0, 1.0, 0.0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", EXCHANGES)
def test_everything_takes_turns(pool: Pool, tmp_path: Path, name: str, ranks: int) -> None:
    """That results are the same, ``measure`` checks: for messages in pipes, and in memory."""
    seen = pool.run(measure, name, (KIB, 1024 * KIB), 2, str(tmp_path / "gloo"), False, ranks=ranks)
    for outcomes in seen:
        assert len(outcomes) == 2
        for outcome in outcomes:
            assert outcome.clocks.keys() == {ANYWHERE, ZEROS, GLOO, COPY}
            assert all(len(clocks.wall) == len(clocks.cpu) == 2 for clocks in outcome.clocks.values())


def test_what_a_rank_must_take_in_or_give_out() -> None:
    parts = {name: [exchange.part(ranks) for ranks in (2, 4)] for name, exchange in EXCHANGES.items()}
    assert parts == {
        "all-reduce": [1, 1.5],
        "reduce-scatter": [0.5, 0.75],
        "all-gather": [0.5, 0.75],
        "broadcast": [1, 1],
        "all-to-all": [0.5, 0.75],
        "send/receive": [1, 1],
    }


def test_a_time_is_that_of_the_slowest_rank() -> None:
    def rank(scale: float) -> Outcome:
        wall = {ANYWHERE: [1.0, 2.0, 9.0], ZEROS: [1.0, 1.0, 1.0], GLOO: [8.0, 8.0, 8.0], COPY: [0.5, 0.5, 0.5]}
        return Outcome({who: Clocks([scale * s for s in times], [1.0] * 3) for who, times in wall.items()}, {})

    anywhere, zeros = rows_of("broadcast", KIB, [rank(1.0), rank(2.0)])
    assert (anywhere.where, anywhere.shared_ms, anywhere.shared_cpu_ms) == (ANYWHERE, 4000.0, 2000.0)
    assert (anywhere.of_gloo, anywhere.copies) == (4.0, 4.0)
    assert (zeros.where, zeros.of_gloo, zeros.copies) == (ZEROS, 8.0, 2.0)


@pytest.mark.parametrize(
    ("row", "slower", "longer"),
    [
        (ROW, False, False),
        (replace(ROW, gloo_ms=3.9), True, False),
        (replace(ROW, copy_ms=0.4), False, True),
        (replace(ROW, size=KIB, gloo_ms=1.0, copy_ms=0.1), False, False),
        (replace(ROW, size=KIB, gloo_ms=0.9), True, False),
    ],
)
def test_what_misses_its_target(row: Row, slower: bool, longer: bool) -> None:
    assert (row.slower, row.longer) == (slower, longer)


def test_no_turns_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--turns", "0"])
    assert "must be at least 1" in capsys.readouterr().err


def test_rows_stand_below_their_heads() -> None:
    assert len(_HEAD.splitlines()[1]) == len(_line(ROW))
    assert _line(replace(ROW, gloo_ms=3.9)).count("!") == 1


def test_ranks_without_a_core_each_are_never_scheduled_ahead_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    asked: list[int] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda thread, policy, param: asked.append(policy))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with scheduling(True, ranks=3):
        assert not asked
    with scheduling(True, ranks=2):
        assert os.SCHED_FIFO in asked
