"""What is told of a pipeline schedule, against what the literature says of it."""

from __future__ import annotations

import shlex
from itertools import pairwise

import pytest

from shoal.errors import ConfigError
from shoal.layout import Layout, kinds
from shoal.pipeline.program import Op
from shoal.report.pipeline import NAMES, PassTimes, Pipeline, clock, percent, pipeline
from shoal.report.pipeline_words import by_rank, figures, next_steps


def admitted(name: str, ranks: int) -> Pipeline:
    return pipeline(name, ranks, kinds.SCHEDULES[name].nearest_mb(ranks, 2 * ranks)[0])


def test_every_schedule_that_a_layout_can_name_can_be_seen() -> None:
    assert tuple(kinds.SCHEDULES) == NAMES


@pytest.mark.parametrize(
    ("name", "makespan", "within", "peaks"),
    [
        ("gpipe", 33, 9, (8, 8, 8, 8)), ("1f1b", 33, 9, (4, 3, 2, 1)),
        ("interleaved", 28.5, 4.5, (5.5, 4.5, 3.5, 2.5)), ("breadth-first", 28.5, 4.5, (8, 8, 8, 8)),
        ("zb-h1", 27, 3, (4, 4, 4, 4)), ("zb-h2", 27, 0, (7, 7, 7, 7)), ("zb-v", 25.5, 0, (4, 4, 4, 4)),
        ("dualpipe-v", 25.5, 1.5, (4.5, 4.5, 4.5, 4.5)),
    ],
)  # fmt: skip
def test_the_numbers_of_four_ranks_and_eight_micro_batches(
    name: str, makespan: float, within: float, peaks: tuple[float, ...]
) -> None:
    seen = pipeline(name, 4, 8)
    assert (seen.makespan, seen.work, seen.bubble_within, seen.peaks) == (makespan, 24, within, peaks)
    assert seen.bubble_per_work == pytest.approx((makespan - 24) / 24)
    assert seen.bubble_share == pytest.approx((makespan - 24) / makespan)
    assert (seen.weight_versions, seen.end) == ((1, 1, 1, 1), makespan)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
def test_a_stream_has_no_bubble_in_its_steady_steps(ranks: int, micro_batches: int) -> None:
    """Nor does its delay change with the step: r ranks before the last, weights are ranks − 1 − r updates old."""
    seen = pipeline("pipedream", ranks, micro_batches, times=PassTimes(1, 1.5, 0.5))
    assert seen.makespan == pytest.approx(3 * micro_batches)
    assert [seen.bubble_per_work, seen.bubble_share, seen.bubble_within] == pytest.approx([0, 0, 0])
    assert seen.weight_versions == seen.peaks == tuple(range(ranks, 0, -1))
    for rank, bars in enumerate(seen.bars):
        assert all(bar.version == max(0, bar.act.micro_batch - (ranks - 1 - rank)) for bar in bars)
    steady = [f"step {step}: steady" for step in (seen.steps - 2, seen.steps - 1)]
    assert [words for _, words in seen.marks][-3:] == [*steady, "drain"]


def test_with_vertical_sync_all_ranks_use_and_keep_as_old_weights_as_the_first() -> None:
    seen = pipeline("pipedream-vertical", 4, 3)
    assert seen.weight_versions == (4, 4, 4, 4)
    assert seen.peaks == (4, 3, 2, 1)
    for bars in seen.bars:
        assert all(bar.version == max(0, bar.act.micro_batch - 3) for bar in bars)


def test_2bw_uses_the_weights_before_the_newest() -> None:
    seen = pipeline("2bw", 4, 4)
    assert max(seen.weight_versions) == 2
    for bars in seen.bars:
        assert all(bar.version == max(0, bar.act.micro_batch // 4 - 1) for bar in bars)


@pytest.mark.parametrize("name", NAMES)
def test_each_pass_is_there_once_and_none_meets_another(name: str) -> None:
    seen = admitted(name, 3)
    for rank, bars in enumerate(seen.bars):
        assert {seen.home[bar.act.stage] for bar in bars} == {rank}
        assert all(one.stop <= other.start + 1e-9 for one, other in pairwise(bars))
        assert {bar.chunk for bar in bars} == set(range(seen.chunks))
    acts = [bar.act for bars in seen.bars for bar in bars]
    assert len(acts) == len(set(acts))
    forward = [act for act in acts if act.op is Op.FORWARD]
    assert len(forward) == len(seen.home) * seen.micro_batches * max(seen.steps, 1)
    assert len(forward) == sum(act.op in (Op.BACKWARD, Op.INPUT_GRADIENT) for act in acts)


@pytest.mark.parametrize("name", NAMES)
def test_json_says_all_of_it(name: str) -> None:
    seen = admitted(name, 2)
    said = seen.as_json()
    assert said["makespan"] == seen.makespan
    assert said["bubble"] == {
        "per_work": seen.makespan / seen.work - 1,
        "share": 1 - seen.work / seen.makespan,
        "span": seen.bubble_within,
    }
    assert (said["peak_live"], said["weight_versions"]) == (list(seen.peaks), list(seen.weight_versions))
    assert [len(one) for one in said["timeline"]] == [len(one) for one in seen.bars]
    first = said["timeline"][0][0]
    assert (first["pass"], first["stage"], first["micro_batch"], first["start"]) == ("F", 0, 0, 0)
    assert ("weights" in first) == kinds.SCHEDULES[name].asynchronous


def test_the_list_is_made_for_the_times() -> None:
    """Where a backward pass for the weights is short, it beats the order that expects it to fill the bubble."""
    times = PassTimes.parse("1,1.5,0.5,0")
    assert pipeline("list", 4, 8, 2, times).makespan < pipeline("zb-v", 4, 8, times=times).makespan
    assert pipeline("list", 4, 8, 1, times).makespan <= pipeline("zb-h1", 4, 8, times=times).makespan


def test_moving_on_takes_time() -> None:
    slow = pipeline("1f1b", 4, 8, times=PassTimes(transfer=0.5))
    assert slow.work == 24
    assert slow.makespan > 33 + 2 * 3 * 0.5
    assert pipeline("1f1b-overlap", 4, 8, times=PassTimes(transfer=0.5)).makespan < slow.makespan


# ---- refusals


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("1f1bb", 4, 8), "NAME = 1f1bb: is not a schedule (did you mean '1f1b'?); use one of gpipe, 1f1b, "),
        (("zbv", 4, 8), "did you mean 'zb-v'?"),
        (("x", 4, 8), "is not a schedule; use one of"),
        (("interleaved", 4, 6), "-m = 6: interleaved over 4 ranks admits multiples of 4 micro-batches; use -m 4 or -m"),
        (("interleaved", 4, 2), "use -m 4"),
        (("dualpipe-v", 4, 7), "-m = 7: dualpipe-v over 4 ranks admits at least 8 micro-batches; use -m 8"),
        (("2bw", 4, 2), "-m = 2: 2bw over 4 ranks admits at least 3 micro-batches; use -m 3"),
        (("zb-v", 4, 8, 3), "-v = 3: zb-v has exactly 2 stages a rank; leave it out, or use interleaved, "),
        (("1f1b", 4, 8, 2), "-v = 2: 1f1b has exactly 1 stage a rank"),
    ],
)  # fmt: skip
def test_what_a_schedule_does_not_admit_is_refused(asked: tuple[str, int, int, int | None], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        pipeline(*asked)
    assert said in str(error.value)


def test_a_schedule_may_be_given_the_stages_that_it_has() -> None:
    assert pipeline("zb-v", 4, 8, 2) == pipeline("zb-v", 4, 8)
    assert pipeline("interleaved", 2, 4, 3).chunks == 3


@pytest.mark.parametrize("text", ["", "1,1,1", "1,1,1,0,0", "1,1,x,0", "-1,1,1,0", "nan,1,1,0", "inf,1,1,0", "0,0,0,1"])
def test_times_are_four_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--times = .*: .*; use four numbers from 0"):
        PassTimes.parse(text)


def test_times_are_read() -> None:
    assert PassTimes.parse("1, 2,.5,0") == PassTimes(1, 2, 0.5, 0)


# ---- words


def test_the_bubble_is_told_in_three_ways() -> None:
    told = {name: (value, what) for name, value, what in figures(pipeline("1f1b", 4, 8))}
    assert told["bubble/work"][0] == "37.5%"
    assert "Megatron" in told["bubble/work"][1]
    assert told["bubble/time"][0] == "27.3%"
    assert "GPipe" in told["bubble/time"][1]
    assert told["bubble in a span"][0] == "9"
    assert told["peak live"][1].startswith("4, 3, 2, 1 on ranks 0–3")


def test_numbers_are_short() -> None:
    assert [clock(time) for time in (0, -1e-16, 33.0, 25.5, 57.6000001, 12345.6)] == [
        "0", "0", "33", "25.5", "57.6", "12,346",
    ]  # fmt: skip
    assert percent(-1e-16) == "0.0%"
    assert by_rank([2, 2, 2]) == "2 on every rank"
    assert by_rank(range(16, 0, -1)) == "16, 15, 14, …, 2, 1 on ranks 0–15"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("micro_batches", [1, 5, 9])
def test_what_to_try_next_can_be_done(name: str, micro_batches: int) -> None:
    """Every schedule that is named admits its micro-batches, and is another."""
    seen = pipeline(name, 4, kinds.SCHEDULES[name].nearest_mb(4, micro_batches)[0])
    commands = [command.split() for _, command in next_steps(seen, drawn=False)]
    assert commands[0][2] != name
    for command in commands:
        if command[1] == "schedule":
            numbers = dict(zip(command[3::2], command[4::2], strict=True))
            pipeline(command[2], int(numbers["-p"]), int(numbers["-m"]))
    assert any("--picture" in command for command in commands)
    assert not any("--picture" in command for _, command in next_steps(seen, drawn=True))


def test_what_to_try_next_keeps_what_was_asked_for() -> None:
    times = PassTimes(1, 1 / 3, 1e-7, 0.5)
    seen = pipeline("list", 2, 4, 2, times, memory=2.5)
    listed, *_ = commands = [shlex.split(command) for _, command in next_steps(seen, drawn=False, memory=2.5)]
    assert listed[:3] == ["shoal", "schedule", "zb-v"]
    schedules = [command for command in commands if command[1] == "schedule"]
    assert all(PassTimes.parse(command[command.index("--times") + 1]) == times for command in schedules)
    assert ["--memory" in command for command in schedules] == [False, True]
    (verify,) = [command for command in commands if command[1] == "verify"]
    layout = Layout.parse(verify[verify.index("--layout") + 1])
    assert layout == Layout(pp=2, schedule="list", chunks=2, mb=4, list_times=times, list_memory=2.5)
    offered = [next(next_steps(pipeline(name, 2, 4, 3), drawn=True))[1] for name in ("interleaved", "breadth-first")]
    assert offered == ["shoal schedule zb-v -p 2 -m 4", "shoal schedule interleaved -p 2 -m 4 -v 3"]
