from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shoal.pipeline.lower import lower
from shoal.pipeline.program import PASSES, Act, Op
from shoal.pipeline.schedules.dualpipe_v import dualpipe_v
from shoal.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.pipeline.schedules.zb_v import zb_v
from shoal.pipeline.simulate import Simulation, even, simulate
from shoal.pipeline.trace import Event, Recorder, compare, message, pass_costs, programs_of, transfers

ACTS = [Act(Op.RECEIVE_ACTIVATION, 1, 0, 0), Act(Op.FORWARD, 1, 0), Act(Op.BACKWARD, 1, 0), Act(Op.UPDATE)]


def record() -> Recorder:
    recorder = Recorder()

    def perform(act: Act) -> None:
        if act.op in PASSES:
            recorder.waits()
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
    assert all(event.waited + event.took == pytest.approx(event.stop - event.start) for run in runs for event in run)


def test_what_is_done_before_an_input_is_waited_for_is_no_waiting() -> None:
    recorder, clock = Recorder(), iter((10.0, 13.0, 14.0, 16.0))

    def perform(_: Act) -> None:
        recorder.waits()
        recorder.arrived()

    recorder.on = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.pipeline.trace.time.time", lambda: next(clock))
        recorder.around(perform)(ACTS[1])
    assert recorder.runs == [[(ACTS[1], 10.0, 13.0, 14.0, 16.0)]]
    assert (recorder.runs[0][0].waited, recorder.runs[0][0].took) == (1.0, 5.0)


def test_nothing_stands_between_an_executor_and_its_actions_while_off() -> None:
    recorder = Recorder()
    assert recorder.around(print) is print
    recorder.waits()
    recorder.arrived()
    assert recorder.runs == []


def test_events_survive_the_way_through_json() -> None:
    for event in record().runs[0]:
        assert Event.read(json.loads(json.dumps(event.as_json()))) == event


def ran_as(simulation: Simulation) -> list[list[Event]]:
    """Each action waits from where the one before it on its rank has ended."""
    return [
        [
            Event(span.act, before, before, span.start, span.stop)
            for before, span in zip([0.0, *(span.stop for span in spans)], spans, strict=False)
        ]
        for spans in simulation.spans
    ]


@pytest.mark.parametrize("transfer", [0.0, 0.5])
@pytest.mark.parametrize("passes", [one_f_one_b(4, 8), zb_v(4, 8)])
def test_what_runs_as_simulated_is_not_late(passes: tuple, transfer: float) -> None:
    """However long messages take."""
    programs = lower(passes)
    chunks = len(programs[0].stages)
    costs = even(4, chunks, forward=2.0, input_gradient=3.0, weight_gradient=1.0, transfer=transfer)
    simulation = simulate(programs, costs)
    found = compare(programs, ran_as(simulation))
    assert found.took == pytest.approx(found.expected) == pytest.approx(simulation.makespan)
    assert len(found.passes) == sum(act.op in PASSES for program in passes for act in program.actions)
    assert max(abs(one.late) for one in found.passes) < 1e-9


def test_a_pass_that_started_too_late_is_late_and_so_is_what_waits_for_it() -> None:
    programs = lower(one_f_one_b(2, 3))
    spans = simulate(programs, even(2)).spans
    slow = 100.0 + 0.5
    ran = [
        [
            Event(act, *(start + slow,) * 3, stop + slow)
            if rank == 1 or act.op is Op.BACKWARD
            else Event(act, *(start + 100,) * 3, stop + 100)
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


@pytest.mark.parametrize("passes", [one_f_one_b(4, 8), zb_v(4, 8), dualpipe_v(2, 5)])
def test_the_programs_are_read_off_what_ran(passes: tuple) -> None:
    programs = lower(passes)
    assert programs_of([[Event(act, 0.0, 0.0, 0.0, 0.0) for act in one.actions] for one in programs]) == tuple(
        replace(one, stages=tuple(sorted(one.stages))) for one in programs
    )


def test_passes_take_what_they_took_on_average_but_for_waiting() -> None:
    events = [
        Event(Act(Op.FORWARD, 0, 0), 0.0, 0.0, 1.0, 3.0),
        Event(Act(Op.FORWARD, 0, 1), 3.0, 3.0, 3.0, 7.0),
        Event(Act(Op.BACKWARD, 0, 0), 7.0, 8.0, 10.0, 14.0),
        Event(Act(Op.INPUT_GRADIENT, 0, 1), 14.0, 14.0, 14.0, 16.0),
        Event(Act(Op.WEIGHT_GRADIENT, 0, 1), 16.0, 16.0, 16.0, 17.0),
        Event(Act(Op.UPDATE), 17.0, 17.0, 17.0, 99.0),
    ]
    costs = pass_costs(events, stages=2, transfer=0.5)
    taken = [costs.time(event.act) for event in events]
    assert taken == [3.0, 3.0, 5.0, 2.0, 1.0, 0.0], "a whole backward pass is not the sum of two halves of others"
    assert costs.time(Act(Op.BACKWARD, 1, 0)) == costs.time(Act(Op.FORWARD, 1, 0)) == 0.0
    assert costs.transfer == 0.5


def test_a_message_took_what_a_pass_waited_for_it_after_it_was_sent() -> None:
    first = [
        Event(Act(Op.SEND_ACTIVATION, 0, 0, 1), 1.0, 1.0, 1.0, 1.1),
        Event(Act(Op.SEND_ACTIVATION, 0, 1, 1), 2.0, 2.0, 2.0, 2.1),
        Event(Act(Op.SEND_ACTIVATION, 0, 2, 1), 3.0, 3.0, 3.0, 3.1),
        Event(Act(Op.BACKWARD, 0, 0), 2.5, 2.5, 8.75, 9.0),
    ]
    second = [
        Event(Act(Op.FORWARD, 1, 0), 0.25, 0.5, 1.25, 2.5),
        Event(Act(Op.FORWARD, 1, 2), 2.5, 3.5, 3.75, 5.0),  # it may have been there when this began to wait
        Event(Act(Op.FORWARD, 1, 1), 5.0, 5.0, 5.0, 6.0),  # it was there already, since when nobody knows
        Event(Act(Op.INPUT_GRADIENT, 1, 0), 6.0, 6.0, 6.0, 8.0),
        Event(Act(Op.SEND_GRADIENT, 1, 0, 0), 8.25, 8.25, 8.25, 8.25),
    ]
    assert list(transfers([first, second], (0, 1))) == [0.5, 0.25]
    assert message([first, second], (0, 1)) == 0.375
    assert list(transfers([[*first[:2], *second]], (0, 0))) == [], "what stays on a rank is no message"
    assert message([[*first[:2], *second]], (0, 0)) is None
