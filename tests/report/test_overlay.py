"""A step over its simulation: what ran as simulated agrees with it, and what did not is found where it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from traces import late, made_up

from shoal.errors import ConfigError
from shoal.pipeline.program import PASSES, Op
from shoal.pipeline.trace import Event
from shoal.pipeline.trace_file import Trace
from shoal.report.overlay import Overlay, overlay
from shoal.report.overlay_words import figures, next_steps

LAYOUTS = [
    "pp=4,mb=8", "pp=3:gpipe,mb=4", "pp=4:1f1b-overlap,mb=6", "pp=2:interleaved,mb=4", "pp=2:zb-v,mb=4",
    "pp=4:zb-h2,mb=8", "pp=2:dualpipe-v,mb=5", "pp=2:list/2,mb=3", "mb=3", "pp=4:pipedream,mb=4", "pp=3:pipedream,mb=1",
    "pp=4:pipedream,mb=1", "pp=8:pipedream,mb=2", "pp=3:pipedream-vertical,mb=3", "pp=4:2bw,mb=4", "pp=1:2bw,mb=2",
]  # fmt: skip


@pytest.mark.parametrize(("line", "transfer"), [*((line, 0.003) for line in LAYOUTS), ("pp=4,mb=8", 0.0)])
def test_what_ran_as_simulated_lies_on_its_simulation(line: str, transfer: float) -> None:
    seen = overlay(made_up(line, transfer))
    assert seen.ratio == pytest.approx(1)
    assert seen.measured.length == pytest.approx(seen.simulated.length)
    for one in ("busy", "waiting", "bubble_share", "bubble_per_work"):
        assert getattr(seen.measured, one) == pytest.approx(getattr(seen.simulated, one), abs=1e-6)
    if seen.transfer is not None:
        assert seen.transfer == pytest.approx(1e3 * transfer, abs=1e-6)
    else:
        assert len(seen.ranks) == 1 or seen.is_stream
    for ran, simulated in zip(seen.measured.lanes, seen.simulated.lanes, strict=True):
        assert [one.act for one in ran if one.act.op in PASSES] == [
            one.act for one in simulated if one.act.op in PASSES
        ]
        passes = [[one for one in lane if one.act.op in PASSES] for lane in (ran, simulated)]
        assert [one.start for one in passes[0]] == pytest.approx([one.start for one in passes[1]], abs=1e-6)
    assert all(wait.measured == pytest.approx(wait.simulated, abs=1e-6) for wait in seen.waits)


def test_the_bubble_is_that_of_the_schedule() -> None:
    """Of one stage a rank that is 1.5 times as slow as the first, by the formulas for stages that are not alike."""
    seen = overlay(made_up("pp=2,mb=8"))
    first, last = 30.0, 45.0
    assert seen.measured.length == pytest.approx(first + 8 * last)
    assert seen.measured.busy == pytest.approx([8 * first / (first + 8 * last), 8 * last / (first + 8 * last)])
    assert seen.times == (
        pytest.approx({Op.FORWARD: 10, Op.BACKWARD: 20}),
        pytest.approx({Op.FORWARD: 15, Op.BACKWARD: 30}),
    )


def test_a_steady_step_of_a_stream_takes_what_its_slowest_rank_works() -> None:
    seen = overlay(made_up("pp=4:pipedream,mb=4"))
    assert (seen.step, seen.is_stream) == (5, True)
    assert seen.measured.length == pytest.approx(4 * 45, abs=1e-6)
    assert seen.measured.busy[-1] == pytest.approx(1, abs=1e-6)
    assert seen.measured.end <= seen.measured.length + 1e-9
    numbers = {one.act.micro_batch for lane in seen.measured.lanes for one in lane if one.act.op in PASSES}
    assert numbers == set(range(-3, 4)), "those of the steps before are below zero"
    assert "whole step" not in {figure.name for figure in figures(seen)}


def test_an_update_of_the_batch_before_is_told_from_that_of_a_step() -> None:
    acts = {str(one.act) for lane in overlay(made_up("pp=4:pipedream,mb=4")).measured.lanes for one in lane}
    assert {"U.-1", "U.-3"} <= acts
    assert "U" not in acts
    assert "U" in {str(one.act) for lane in overlay(made_up("pp=4,mb=2")).measured.lanes for one in lane}


def working_before(trace: Trace, by: float) -> Trace:
    """A rank does the first part of a pass while it waits, where it waits so long."""

    def one(event: Event) -> Event:
        return event._replace(waits=event.start + by) if event.act.op in PASSES and event.waited > by else event

    return replace(trace, runs=tuple([[one(event) for event in run] for run in runs] for runs in trace.runs))


def test_what_a_rank_does_before_it_waits_is_work() -> None:
    trace = made_up("pp=2,mb=3")
    waiting, working = overlay(trace), overlay(working_before(trace, 0.004))
    assert working.measured.length == waiting.measured.length
    for rank, lane in enumerate(working.measured.lanes):
        before = sum(one.before for one in lane)
        assert before == pytest.approx(4.0 * sum(wait.rank == rank and wait.act.op in PASSES for wait in working.waits))
        more = working.measured.busy[rank] - waiting.measured.busy[rank]
        assert more == pytest.approx(before / waiting.measured.length)
        assert waiting.measured.waiting[rank] - working.measured.waiting[rank] == pytest.approx(more)
    assert working.times[0][Op.BACKWARD] > waiting.times[0][Op.BACKWARD]


def test_a_message_that_came_late_is_the_longest_wait_beyond_the_simulation() -> None:
    seen = overlay(made_up("pp=2,mb=3", more=lambda _, act: late(act, Op.SEND_ACTIVATION, 0, 1, 0.2)))
    rank, act, measured, simulated = seen.surprises[0]
    assert (rank, str(act)) == (1, "F1.1")
    assert measured - simulated > 100
    assert seen.ratio > 1.5
    assert seen.waits[0].measured >= seen.waits[-1].measured


def test_a_rank_waits_for_the_norm_until_all_have_come_to_it() -> None:
    seen = overlay(made_up("pp=4,mb=4", more=lambda _, act: {Op.NORM: 0.001, Op.UPDATE: 0.002}.get(act.op, 0.0)))
    (norm,) = [wait for wait in seen.waits if str(wait.act) == "N" and wait.rank == 3]
    last = max(one.stop for one in seen.measured.lanes[3] if one.act.op in PASSES)
    assert norm.measured == pytest.approx(seen.measured.length - last, abs=1e-6)
    assert [sum(pair) for pair in zip(seen.measured.busy, seen.measured.waiting, strict=True)] == pytest.approx([1] * 4)
    assert seen.measured.end == pytest.approx(seen.measured.length + 3), "norm and update are no part of it"


def test_the_typical_step_is_the_one_of_median_length() -> None:
    trace = made_up("pp=2,mb=2", more=lambda step, act: {3: 0.5, 4: 0.0, 5: 0.1}[step] * (act.op is Op.FORWARD))
    assert overlay(trace).step == 5
    assert [overlay(trace, step).step for step in (3, 4, 5)] == [3, 4, 5]
    lengths = [overlay(trace, step).measured.length for step in (4, 5, 3)]
    assert lengths == sorted(lengths)
    assert all(overlay(trace, step).ratio == pytest.approx(1) for step in (3, 4, 5)), "by the times of the step itself"


def test_a_pipeline_is_shown_by_any_of_its_ranks() -> None:
    alone = made_up("pp=2,mb=4")
    slow = made_up("pp=2,mb=4", more=lambda _, act: 0.01 * (act.op is Op.BACKWARD))
    runs = (alone.runs[0], slow.runs[0], alone.runs[1], slow.runs[1])
    both = replace(alone, layout="dp=2,pp=2,mb=4", pipelines=((0, 2), (1, 3)), runs=runs)
    for rank, ranks, one in ((0, (0, 2), alone), (1, (1, 3), slow), (3, (1, 3), slow)):
        seen = overlay(both, rank=rank)
        assert seen.ranks == ranks
        assert seen.measured == overlay(one).measured
        assert {wait.rank for wait in seen.waits} <= set(ranks)


# ---- refusals


def test_a_step_or_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--step = 9: the whole steps of the trace are 3, 4, 5; use 5"):
        overlay(made_up("pp=2,mb=2"), step=9)
    with pytest.raises(ConfigError, match=r"--rank = 2: the trace is of 2 ranks; use --rank 0"):
        overlay(made_up("pp=2,mb=2"), rank=2)
    with pytest.raises(ConfigError, match=r"--step = 3: the whole steps of the trace are 4, 5; use 4"):
        overlay(made_up("pp=2:2bw,mb=2"), step=3)


def test_a_step_of_which_something_is_missing_is_not_shown() -> None:
    trace = made_up("pp=2,mb=3")
    cut = replace(trace, runs=(trace.runs[0], [run[:-4] for run in trace.runs[1]]))
    with pytest.raises(ConfigError, match=r"none of its steps is whole; write another with shoal train RUN.toml"):
        overlay(cut)
    first = replace(trace, runs=(trace.runs[0], [trace.runs[1][0][:-4], *trace.runs[1][1:]]))
    with pytest.raises(ConfigError, match=r"the whole steps of the trace are 4, 5"):
        overlay(first, step=3)


def test_a_stream_that_began_anew_has_no_steady_step() -> None:
    """After an evaluation, say: micro-batches are counted from 0 again."""
    trace = made_up("pp=2:pipedream,mb=2")

    def anew(run: list[Event]) -> list[Event]:
        first = run[0].act.micro_batch
        return [event._replace(act=event.act._replace(micro_batch=event.act.micro_batch - first)) for event in run]

    broken = replace(trace, runs=tuple([runs[0], runs[1], anew(list(runs[2]))] for runs in trace.runs))
    with pytest.raises(ConfigError, match=r"takes 3 in a row without a drain; .* evaluation.every=0"):
        overlay(broken)


def test_a_trace_of_a_stream_that_is_too_short_is_told_so() -> None:
    trace = made_up("pp=4:pipedream,mb=1")
    short = replace(trace, runs=tuple(list(runs)[:3] for runs in trace.runs))
    problem = r"with 3 steps it is too short for a whole one of 4 ranks: that takes 5 in a row"
    with pytest.raises(ConfigError, match=f"{problem}; .* --trace, where 10 steps are left to make"):
        overlay(short)


# ---- words


def test_json_has_all_of_it() -> None:
    seen = overlay(made_up("pp=2:zb-v,mb=4", 0.001), step=4)
    said = seen.as_json()
    assert said["step_ms"] == {"measured": seen.measured.length, "simulated": seen.simulated.length}
    assert said["ratio"] == seen.ratio
    assert said["bubble"]["measured"]["share"] == seen.measured.bubble_share
    assert said["busy"]["simulated"] == list(seen.simulated.busy)
    assert (said["ranks"], said["stages"], said["steps"], said["step"]) == ([0, 1], [[0, 3], [1, 2]], [3, 4, 5], 4)
    assert said["transfer_ms"] == pytest.approx(1, abs=1e-6)
    assert [set(times) for times in said["passes_ms"]] == [{"F", "I", "W"}] * 4
    assert [len(lane) for lane in said["timeline"]["measured"]] == [len(lane) for lane in seen.measured.lanes]
    assert said["waits"][0]["ms"] == seen.waits[0].measured


def steps(seen: Overlay, drawn: bool = False) -> dict[str, str]:
    return dict(next_steps(seen, Path("out/run"), Path("out/run/trace.json"), drawn))


def test_what_to_try_next_has_the_times_as_they_are() -> None:
    seen = overlay(made_up("pp=2,mb=4", 0.0005))
    assert steps(seen)["a picture of both"] == "shoal report out/run --out out/run/report.svg"
    assert "shoal schedule list -p 2 -m 4 --times 12.5,12.5,12.5,0.5" in steps(seen).values()
    assert "a picture of both" not in steps(seen, drawn=True)
    split = overlay(made_up("pp=2:zb-h1,mb=4"))
    assert "shoal schedule list -p 2 -m 4 --times 12.5,15,10,0" in steps(split).values()
    assert not any("schedule" in command for command in steps(overlay(made_up("pp=2:2bw,mb=2"))).values())
    assert not any("schedule" in command for command in steps(overlay(made_up("mb=2"))).values())
