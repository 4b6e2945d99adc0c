"""The file of a trace: as Perfetto reads it, and as it is read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.layout import Layout
from shoal.pipeline.program import Act, Op
from shoal.pipeline.trace import Event
from shoal.pipeline.trace_file import Trace, from_chrome, steps_traced, to_chrome

EVENTS = [
    Event(Act(Op.RECEIVE_ACTIVATION, 1, 0, 0), 5.0, 5.0, 5.0, 5.25),
    Event(Act(Op.FORWARD, 1, 0), 5.25, 5.5, 6.0, 7.0),
    Event(Act(Op.UPDATE), 7.0, 7.0, 7.0, 7.5),
]
TRACE = Trace("pp=2,dp=2,mb=3", "1f1b", 3, ((0, 2), (1, 3)), first=3, runs=([EVENTS, EVENTS],) * 4)


def written() -> dict[str, Any]:
    return json.loads(json.dumps(to_chrome(TRACE, [f"rank {rank}" for rank in range(4)])))


def test_a_process_for_each_rank_and_a_row_for_each_stage() -> None:
    entries = written()["traceEvents"]
    named = {(one["pid"], one["tid"]): one["args"]["name"] for one in entries if one["name"] == "thread_name"}
    assert named == {(rank, row): name for rank in range(4) for row, name in ((0, "the step"), (2, "stage 1"))}
    assert [one["args"]["name"] for one in entries if one["name"] == "process_name"] == [f"rank {r}" for r in range(4)]
    spans = [one for one in entries if one["ph"] == "X" and one["pid"] == 1][:4]
    assert [(one["name"], one["tid"], one["cat"], one["ts"], one["dur"]) for one in spans] == [
        ("RA1.0<0", 2, "message", 0, 250_000),
        ("F1.0", 2, "pass", 250_000, 1_750_000),
        ("wait", 2, "wait", 500_000, 500_000),
        ("U", 0, "step", 2_000_000, 500_000),
    ]
    what = spans[1]["args"]
    assert (what["what"], what["step"]) == ("the forward pass of stage 1, micro-batch 0", 3)


def test_what_else_a_reader_needs_is_said_once() -> None:
    assert written()["otherData"] == {
        "layout": "pp=2,dp=2,mb=3", "schedule": "1f1b", "micro_batches": 3, "pipelines": [[0, 2], [1, 3]],
        "ranks": 4, "stages": [[1]] * 4, "first_step": 3, "steps": 2,
    }  # fmt: skip


def test_it_is_read_back() -> None:
    read = from_chrome(written())
    assert (read.layout, read.schedule, read.micro_batches) == (TRACE.layout, TRACE.schedule, TRACE.micro_batches)
    assert (read.pipelines, read.steps) == (TRACE.pipelines, range(3, 5))
    assert len(read.runs) == 4
    for runs in read.runs:
        assert [[event.act for event in run] for run in runs] == [[event.act for event in EVENTS]] * 2
        times = [[time - 5.0 for time in event[1:]] for event in EVENTS]
        assert [[*event[1:]] for event in runs[1]] == [pytest.approx(one) for one in times]


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("pp=8,mb=2", range(2, 5)),
        ("pp=2:2bw,mb=4", range(2, 6)),
        ("pp=4:pipedream,mb=1", range(4, 10)),
        ("pp=8:pipedream,mb=2", range(4, 11)),
    ],
)
def test_which_steps_are_written_down(line: str, steps: range) -> None:
    """Three, after two; in a stream that is full, and until the last rank has done them."""
    assert steps_traced(Layout.parse(line)) == steps


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda trace: trace["traceEvents"], "not what shoal train --trace writes"),
        (lambda trace: {"traceEvents": trace["traceEvents"]}, "not what shoal train --trace writes: .*otherData"),
        (lambda trace: {**trace, "traceEvents": [{"name": "aten::mm", "ph": "X", "cat": "cpu_op"}]}, "'pid'"),
        (lambda trace: {**trace, "traceEvents": trace["traceEvents"][:-8]}, "no forward pass in some step"),
        (lambda trace: {**trace, "otherData": {**trace["otherData"], "ranks": 1}}, "not what shoal train"),
    ],
)
def test_what_is_no_such_trace_is_told(spoil: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_chrome(spoil(written()))
