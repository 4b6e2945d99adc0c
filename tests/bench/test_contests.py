from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest

from bench.__main__ import CONTESTS
from bench.check import check
from bench.pairs import SHOAL, Clocks, Outcome, TrainersDiffer, compare, in_turn, joined, ratio, read, rounds
from bench.trainers import Case
from shoal.comm.world import World
from shoal.config import Model
from shoal.train.pool import Pool

TINY = Model(layers=3, hidden=16, heads=4, kv_heads=2, ffn=22, vocab=30)
CASE = Case(TINY, samples=4, seq_len=7)


@pytest.mark.parity
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CONTESTS)
def test_every_trainer_does_what_one_process_does(pool: Pool, name: str, tied: bool) -> None:
    contest = CONTESTS[name]
    case = replace(CASE, shape=TINY.model_copy(update={"tied": tied}), mb=contest.mbs[-1])
    expected = {*contest.peers, *([SHOAL] if contest.built else [])}
    for differences in pool.run(check, contest, case, ranks=contest.layout.ranks):
        assert differences.keys() == expected


def samples(world: World, name: str) -> list[int]:
    return CONTESTS[name].batches(CASE, world, 1)[0]["sample"].tolist()


@pytest.mark.parametrize(("name", "divided"), [("ddp", True), ("tensor", False), ("gpipe", False)])
def test_replicas_divide_the_samples_and_other_ranks_share_them(pool: Pool, name: str, divided: bool) -> None:
    everything = read(CASE, ranks=2, steps=1)[0]["sample"].tolist()
    first, second = pool.run(samples, name, ranks=2)
    assert len(everything) == 2 * CASE.samples
    assert (first + second == everything) if divided else (first == second == everything)


@pytest.mark.parametrize(
    ("step", "loss", "norm"), [(0, nan, 1.0), (0, 1.0, nan), (0, 1.0, 1.1), (0, 1.1, 1.0), (2, 1.1, 1.0), (2, nan, 1.0)]
)
def test_a_trainer_that_does_other_work_is_refused(step: int, loss: float, norm: float) -> None:
    steps = [{"one": (1.0, 1.0), "other": (1.0, 1.0)} for _ in range(3)]
    steps[step] = {"one": (1.0, 1.0), "other": (loss, norm)}
    with pytest.raises(TrainersDiffer, match=f"step {step + 1}: .* with other"):
        compare("one", steps)


def test_the_largest_difference_of_a_loss_is_kept_and_later_norms_are_not_compared() -> None:
    steps = [{"one": (1.0, 1.0), "other": (1.0 + shift, norm)} for shift, norm in ((0.0, 1.0), (5e-6, 2.0), (0.0, 1.0))]
    assert compare("one", steps)["other"] == pytest.approx(5e-6)


def test_fresh_processes_measure_all_pairs_between_them() -> None:
    assert [part.pairs for part in rounds(replace(CASE, pairs=15))] == [4, 4, 4, 3]
    assert [part.pairs for part in rounds(replace(CASE, pairs=2))] == [2]
    seen = [
        Outcome({SHOAL: Clocks([1.0, 2.0], [3.0, 4.0])}, {"DDP": 1e-7}),
        Outcome({SHOAL: Clocks([5.0], [6.0])}, {"DDP": 2e-7}),
    ]
    assert joined(seen) == Outcome({SHOAL: Clocks([1.0, 2.0, 5.0], [3.0, 4.0, 6.0])}, {"DDP": 2e-7})


def test_who_goes_first_alternates() -> None:
    assert [list(in_turn(["Shoal", "DDP"], pair)) for pair in range(3)] == [
        ["Shoal", "DDP"],
        ["DDP", "Shoal"],
        ["Shoal", "DDP"],
    ]


def test_the_ratio_is_of_neighbours() -> None:
    found = ratio([1.0, 20.0, 9.0], [2.0, 40.0, 1.0])
    assert (found.of_pairs, found.of_medians) == (0.5, 4.5)
