from __future__ import annotations

import json

import pytest

from shoal.pipeline.lower import lower
from shoal.pipeline.program import PASSES, Act, Op
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.pipeline.schedules.zb_v import zb_v
from shoal.pipeline.simulate import even, simulate
from shoal.pipeline.trace import Event, Recorder, chrome_trace, compare

ACTS = [Act(Op.RECEIVE_ACTIVATION, 1, 0, 0), Act(Op.FORWARD, 1, 0), Act(Op.BACKWARD, 1, 0), Act(Op.UPDATE)]


def record() -> Recorder:
    recorder = Recorder()

    def perform(act: Act) -> None:
        if act.op in PASSES:
            recorder.arrived()

    recorder.on = True
    for _ in range(2):
        performed = recorder.around(perform)
        for act in ACTS:
            performed(act)
    return recorder


def test_every_action_is_written_down_in_order_a_list_for_each_run() -> None:
    runs = record().runs
    assert [[event.act for event in run] for run in runs] == [ACTS, ACTS]
    times = [time for run in runs for event in run for time in event[1:]]
    assert times == sorted(times)
    assert runs[0][0].ready == runs[0][0].start, "a receive waits for nothing"


def test_nothing_stands_between_an_executor_and_its_actions_while_off() -> None:
    recorder = Recorder()
    assert recorder.around(print) is print
    recorder.arrived()
    assert recorder.runs == []


def test_events_survive_the_way_through_json() -> None:
    for event in record().runs[0]:
        assert Event.read(json.loads(json.dumps(event.as_json()))) == event


def test_the_trace_has_a_process_for_each_rank_and_a_row_for_each_stage() -> None:
    events = [
        Event(ACTS[0], 5.0, 5.0, 5.25),
        Event(ACTS[1], 5.25, 6.0, 7.0),
        Event(ACTS[3], 7.0, 7.0, 7.5),
    ]
    trace = chrome_trace([[events], [events]], ["rank 0", "rank 1"], first=3)
    entries = trace["traceEvents"]
    named = {(one["pid"], one["tid"]): one["args"]["name"] for one in entries if one["name"] == "thread_name"}
    assert named == {(rank, row): name for rank in (0, 1) for row, name in ((0, "the step"), (2, "stage 1"))}
    assert [one["args"]["name"] for one in entries if one["name"] == "process_name"] == ["rank 0", "rank 1"]
    spans = [one for one in entries if one["ph"] == "X" and one["pid"] == 1]
    assert [(one["name"], one["tid"], one["cat"], one["ts"], one["dur"]) for one in spans] == [
        ("RA1.0<0", 2, "message", 0, 250_000),
        ("F1.0", 2, "pass", 250_000, 1_750_000),
        ("wait", 2, "wait", 250_000, 750_000),
        ("U", 0, "step", 2_000_000, 500_000),
    ]
    assert spans[1]["args"] == {"what": "the forward pass of stage 1, micro-batch 0", "step": 3}


@pytest.mark.parametrize("passes", [one_f_one_b(4, 8), zb_v(4, 8)])
def test_what_runs_as_simulated_is_not_late(passes: tuple) -> None:
    programs = lower(passes)
    costs = even(4, len(programs[0].stages), forward=2.0, input_gradient=3.0, weight_gradient=1.0)
    simulation = simulate(programs, costs)
    ran = [[Event(act, start, start, stop) for act, start, stop in spans] for spans in simulation.spans]
    found = compare(programs, ran)
    assert found.took == pytest.approx(found.expected) == pytest.approx(simulation.makespan)
    assert len(found.passes) == sum(act.op in PASSES for program in passes for act in program.actions)
    assert max(abs(one.late) for one in found.passes) < 1e-9


def test_a_pass_that_started_too_late_is_late_and_so_is_what_waits_for_it() -> None:
    programs = lower(one_f_one_b(2, 3))
    spans = simulate(programs, even(2)).spans
    slow = 100.0 + 0.5
    ran = [
        [
            Event(act, start + 100, start + (slow if rank == 1 or act.op is Op.BACKWARD else 100), stop + slow)
            if rank == 1 or act.op is Op.BACKWARD
            else Event(act, start + 100, start + 100, stop + 100)
            for act, start, stop in of_rank
        ]
        for rank, of_rank in enumerate(spans)
    ]
    found = compare(programs, ran)
    late = {str(one.act): one.late for one in found.passes}
    assert late == pytest.approx({name: 0.0 if name.startswith("F0") else 0.5 for name in late})
    assert found.took == pytest.approx(found.expected + 0.5)
    rows = {(stage, name): rest for stage, name, *rest in found.by_stage()}
    assert rows[0, "F"] == pytest.approx([1.0, 0.0, 0.0])
    assert rows[1, "B"] == pytest.approx([2.0, 0.5, 0.5])
