"""A trace as a file: written for Perfetto and chrome://tracing, and read back for a report.

Source: Trace Event Format (Google, 2016), of which Perfetto reads complete ("X") and metadata ("M") events. What else
there is to know of the run is in ``otherData``, which viewers leave alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.layout import Layout
from shoal.pipeline.program import PASSES, Act, Op
from shoal.pipeline.trace import Event, Runs

TRACE = "trace.json"
"""What it is called in the folder of a run."""
_WAIT = "wait"
_WARM, _FEW = 2, 3
"""Steps that make memory and connections ready, and those after them that are written down."""


def steps_traced(layout: Layout) -> range:
    """Which steps of a run are written down, counted from 0 where it begins or goes on.

    Where steps overlap, the pipeline is to be full, and the last rank does some of a step ⌈(P − 1)/M⌉ steps after the
    first one: so many more are needed, of which the report can show none.
    """
    if not layout.asynchronous:
        return range(_WARM, _WARM + _FEW)
    warm = max(_WARM, -(-layout.pp // layout.mb))
    return range(warm, warm + _FEW + lag_of(layout))


def lag_of(layout: Layout) -> int:
    """Where steps overlap: after how many more the last rank has done what the first has."""
    return -(-(layout.pp - 1) // layout.mb)


@dataclass(frozen=True)
class Trace:
    """Some steps of a run under ``layout``, its layout in one line."""

    layout: str
    schedule: str
    micro_batches: int
    """Of a step, of each pipeline."""
    pipelines: tuple[tuple[int, ...], ...]
    """The ranks of each pipeline, in the order in which its programs count them."""
    first: int
    """The number of the first step."""
    runs: tuple[Runs, ...]
    """What each rank ran, by step."""

    @property
    def steps(self) -> range:
        """The numbers of the steps."""
        return range(self.first, self.first + len(self.runs[0]))


def to_chrome(trace: Trace, names: Sequence[str]) -> dict[str, Any]:
    """The file, as JSON: a process for each rank, called by its name, and in it a row for each stage, and one for what
    concerns the step. Times are in microseconds from the first event."""
    begin = min(event.start for runs in trace.runs for run in runs for event in run)
    entries: list[dict[str, Any]] = []
    for rank, (runs, name) in enumerate(zip(trace.runs, names, strict=True)):
        entries += _titles(rank, name, runs)
        for step, run in zip(trace.steps, runs, strict=True):
            for event in run:
                entries += _entries(rank, step, event, begin)
    about = {
        "layout": trace.layout,
        "schedule": trace.schedule,
        "micro_batches": trace.micro_batches,
        "pipelines": trace.pipelines,
        "ranks": len(trace.runs),
        "stages": [_stages(runs) for runs in trace.runs],
        "first_step": trace.first,
        "steps": len(trace.steps),
    }
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": entries}


def from_chrome(document: Any) -> Trace:
    """What :func:`to_chrome` has made a file of. Raises ``ValueError`` where ``document`` is none of its."""
    try:
        about = document["otherData"]
        first, steps = about["first_step"], about["steps"]
        runs: list[list[list[Event]]] = [[[] for _ in range(steps)] for _ in range(about["ranks"])]
        for entry in document["traceEvents"]:
            if entry["ph"] == "X" and entry["cat"] != _WAIT:
                runs[entry["pid"]][entry["args"]["step"] - first].append(_event(entry))
        pipelines = tuple(map(tuple, about["pipelines"]))
        trace = Trace(about["layout"], about["schedule"], about["micro_batches"], pipelines, first, tuple(runs))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"not what shoal train --trace writes: {type(error).__name__} {error}") from None
    if not steps or not all(any(event.act.op is Op.FORWARD for event in run) for one in runs for run in one):
        raise ValueError("some rank has no forward pass in some step")
    return trace


def _stages(runs: Runs) -> list[int]:
    return sorted({event.act.stage for run in runs for event in run if event.act.stage >= 0})


def _titles(rank: int, name: str, runs: Runs) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": name}}
    for stage in (-1, *_stages(runs)):
        title = "the step" if stage < 0 else f"stage {stage}"
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": stage + 1, "args": {"name": title}}


def _entries(rank: int, step: int, event: Event, begin: float) -> Iterator[dict[str, Any]]:
    """An action and, inside it, the part in which it waited."""
    act, start, waits, _, stop = event
    where = {"ph": "X", "pid": rank, "tid": act.stage + 1}
    what = {
        "what": act.in_words(),
        "step": step,
        "op": act.op.value,
        "stage": act.stage,
        "micro_batch": act.micro_batch,
        "peer": act.peer,
        "before_us": 1e6 * (waits - start),
        "waited_us": 1e6 * event.waited,
    }
    ran = {"ts": 1e6 * (start - begin), "dur": 1e6 * (stop - start)}
    yield {"name": str(act), "cat": _category(act), **where, **ran, "args": what}
    if event.waited > 0:
        yield {"name": _WAIT, "cat": _WAIT, **where, "ts": 1e6 * (waits - begin), "dur": 1e6 * event.waited}


def _category(act: Act) -> str:
    if act.op in PASSES:
        return "pass"
    return "message" if act.peer >= 0 else "step"


def _event(entry: Mapping[str, Any]) -> Event:
    what = entry["args"]
    start = entry["ts"] / 1e6
    waits = start + what["before_us"] / 1e6
    act = Act(Op(what["op"]), what["stage"], what["micro_batch"], what["peer"])
    return Event(act, start, waits, waits + what["waited_us"] / 1e6, start + entry["dur"] / 1e6)
