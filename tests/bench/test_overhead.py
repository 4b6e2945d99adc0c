from __future__ import annotations

from dataclasses import replace

import pytest

from bench import zero_deepspeed
from bench.overhead import ALONE, DUELS, MBS, Above, Duel, growth_of, label, main, measure, rows_of
from bench.pairs import SHOAL, Clocks, Outcome, read
from bench.single import plain, share
from bench.trainers import Case
from bench.zero import PARAMETERS
from shoal.comm.world import World
from shoal.config import Model
from shoal.train.pool import Pool

TINY = Model(layers=2, hidden=12, heads=2, kv_heads=2, ffn=22, vocab=30, tied=True)
CASE = Case(TINY, samples=4, seq_len=7, pairs=2)
FSDP2 = next(iter(PARAMETERS))


@pytest.mark.parity
@pytest.mark.parametrize("name", DUELS)
def test_every_trainer_is_timed_with_each_number_of_micro_batches(pool: Pool, name: str) -> None:
    """That they do the same work, ``measure`` checks."""
    duel = DUELS[name]
    names = {label(who, mb) for mb in MBS for who in (SHOAL, ALONE, *duel.contest.peers)}
    for outcome in pool.run(measure, duel, CASE, False, ranks=2):
        assert outcome.clocks.keys() == names
        assert all(len(clocks.wall) == len(clocks.cpu) == CASE.pairs for clocks in outcome.clocks.values())


def norms(world: World, mb: int) -> list[tuple[float, float]]:
    batches = read(CASE, 1, 2)
    steps = [make(replace(CASE, mb=mb), world) for make in (plain, share)]
    return [step(batch) for step in steps for batch in batches]


@pytest.mark.parametrize("mb", MBS)
def test_shares_have_all_gradients_between_them_and_each_updates_its_own(pool: Pool, mb: int) -> None:
    ranks = pool.run(norms, mb, ranks=2)
    (whole, whole_later), (own, own_later) = ranks[0][:2], ranks[0][2:]
    other, other_later = ranks[1][2:]
    assert own[0] == other[0] == whole[0]
    assert own[1] ** 2 + other[1] ** 2 == pytest.approx(whole[1] ** 2)
    assert len({whole_later[0], own_later[0], other_later[0]}) == 3  # of different updates


def seen(steps: dict[tuple[str, int], list[float]]) -> list[Outcome]:
    """Two ranks, in milliseconds; the second waits a little longer in every step."""
    return [
        Outcome({label(*key): Clocks([(s + late) / 1e3 for s in times], [s / 2e3 for s in times])
                 for key, times in steps.items()}, {})
        for late in (0.0, 1.0)
    ]  # fmt: skip


def times(shoal: float, peer: float) -> dict[tuple[str, int], list[float]]:
    """Turns in which the machine is ever slower; overheads with one micro-batch, and one more with more."""
    floor = [100.0, 200.0, 400.0]
    above = {ALONE: 0.0, SHOAL: shoal, FSDP2: peer}
    return {(who, mb): [s + more + (mb > 1 and more != 0) for s in floor] for mb in MBS for who, more in above.items()}


def test_a_step_is_measured_above_that_of_the_same_turn() -> None:
    duel = Duel("dp=2,zero=3", share, {FSDP2: PARAMETERS[FSDP2]})
    one, many = rows_of(duel, CASE, seen(times(10.0, 40.0)))
    assert (one.mb, many.mb, one.floor_wall_ms) == (*MBS, pytest.approx(201.0))
    for found, expected in (
        (one.shoal_wall, 10.0),
        (one.peer_wall, 40.0),
        (one.shoal_cpu, 10.0),
        (many.peer_cpu, 41.0),
    ):
        assert found is not None
        assert (found.median, found.spread) == (pytest.approx(expected), pytest.approx(0.0, abs=1e-9))
    assert (one.wall, one.cpu, one.missed) == (pytest.approx(0.25), pytest.approx(0.25), False)
    growth = growth_of(duel, CASE, seen(times(10.0, 40.0)))
    assert (growth.wall, growth.missed) == (pytest.approx(1.1), True)
    assert not growth_of(replace(duel, once=False), CASE, seen(times(10.0, 40.0))).missed


@pytest.mark.parametrize(
    ("shoal", "peer", "ratio", "missed"),
    [(21.0, 40.0, 0.525, True), (-4.0, 40.0, -0.1, False), (-4.0, -8.0, None, True)],
)
def test_more_than_half_is_told_and_so_is_a_peer_without_overhead(
    shoal: float, peer: float, ratio: float | None, missed: bool
) -> None:
    row, _ = rows_of(Duel("dp=2,zero=3", share, {FSDP2: PARAMETERS[FSDP2]}), CASE, seen(times(shoal, peer)))
    assert row.wall == (None if ratio is None else pytest.approx(ratio))
    assert row.missed is missed


def test_without_deepspeed_its_rows_have_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_deepspeed, "INSTALLED", False)
    duel = Duel("dp=2,zero=3", share, {FSDP2: PARAMETERS[FSDP2]}, deepspeed=3)
    row = rows_of(duel, CASE, seen(times(10.0, 40.0)))[1]
    assert (row.peer, row.peer_wall, row.wall, row.missed) == ("DeepSpeed ZeRO-3", None, None, False)
    assert row.shoal_wall == Above(pytest.approx(10.0), pytest.approx(0.0, abs=1e-9))


def test_a_wrong_number_of_turns_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--pairs", "-1"])
    assert "must be at least 1" in capsys.readouterr().err
