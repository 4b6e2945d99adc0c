from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest
from whole_runs import make_store, write_run

from bench import convergence
from bench.convergence import STEPS, Row, Trained, choose, config, faults, layouts, main, trained
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.setup import fit

BASE, OTHER = "pp=2:1f1b", "pp=2:2bw"


def row(layout: str, lr: float, *finals: float) -> Row:
    return Row(layout, lr, tuple(Trained(7.6, final) for final in finals))


def test_each_layout_has_the_rate_with_the_lowest_mean_and_not_with_the_lowest_loss() -> None:
    rows = [
        row(BASE, 0.1, 4.0, 5.0), row(BASE, 0.3, 4.3, 4.5), row(BASE, 1.0, 3.9, inf),
        row(OTHER, 0.1, 4.5, 4.5), row(OTHER, 0.3, 4.6, 4.6), row(OTHER, 1.0, 4.9, 4.9),
    ]  # fmt: skip
    best = choose(rows)
    assert list(best) == [BASE, OTHER]
    assert (best[BASE].lr, best[BASE].mean) == (0.3, pytest.approx(4.4))
    assert best[OTHER].lr == 0.1


@pytest.mark.parametrize(
    ("base", "other", "expected"),
    [
        (5.0, 5.049, []),
        (5.0, 4.0, []),
        (5.0, 5.051, [OTHER]),
        (5.0, inf, [OTHER]),
        (5.61, 5.61, [BASE]),
        (inf, 5.0, [BASE]),
    ],
)
def test_a_loss_that_is_too_high_or_fell_too_little_is_told(base: float, other: float, expected: list[str]) -> None:
    found = faults(choose([row(BASE, 0.1, base), row(OTHER, 0.1, other)]))
    assert [line.split(": ")[0] for line in found] == expected


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_fits_and_has_updates_of_the_same_samples(ranks: int) -> None:
    run = config(Path("folder"), 1e-3, seed=0, steps=STEPS)
    plans = [fit(run, Layout.parse(layout), ranks) for layout in layouts(ranks)]
    assert [plan.schedule for plan in plans] == ["1f1b", "2bw", "pipedream"]
    updates = [plan.mb if plan.schedule == "pipedream" else 1 for plan in plans]
    assert updates == [1, 1, 1]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on the first bytes of the text, a byte a token."""
    monkeypatch.setattr(convergence, "RUN", write_run(tmp_path, make_store(tmp_path)))


@pytest.mark.parity
@pytest.mark.usefixtures("small")
def test_each_schedule_trains_and_is_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(convergence, "MOST", 1.1)
    for fall, code in ((0.01, 0), (9.0, 1)):
        monkeypatch.setattr(convergence, "FALL", fall)
        assert main(["--quick", "--steps", "12", "--json"]) == code
        seen = json.loads(capsys.readouterr().out)
        assert len(seen["faults"]) == code
    losses = [one["losses"][0] for one in seen["rows"]]
    assert [one["layout"] for one in seen["rows"]] == list(layouts(2))
    assert len(set(losses)) == 3  # each schedule has other updates, so none is another under a false name
    assert all(0 < loss < 5 for loss in losses)


@pytest.mark.parity
@pytest.mark.usefixtures("small")
def test_a_run_that_diverges_has_an_infinite_loss_and_others_go_on() -> None:
    with Pool(2) as pool:
        assert trained(pool, layouts(2)[0], 1e30, 0, steps=15).final == inf
        assert trained(pool, layouts(2)[0], 1e-3, 0, steps=1).final < 6
