"""A trace of some steps of a run, from all ranks, in one file; and how far they were from the simulation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.comm.collectives import all_gather_bytes
from shoal.engine import Engine
from shoal.mesh import Grid
from shoal.pipeline.trace import Event, compare, programs_of, typical
from shoal.pipeline.trace_file import TRACE, Trace, steps_traced, to_chrome


class Tracing:
    """Has ``engine`` write down the steps that :func:`steps_traced` names, or the last of ``left`` where there are no
    more, and puts them in a file of ``folder``."""

    def __init__(self, engine: Engine, folder: Path, left: int) -> None:
        self._engine, self._path = engine, folder / TRACE
        steps = steps_traced(engine.layout)
        self._first = engine.steps_done + max(0, min(steps.start, left - 1))
        self._stop = self._first + len(steps)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """For step number ``step``, counted from 0."""
        recorder = self._engine.recorder
        recorder.on = self._first <= step < self._stop
        try:
            yield
        finally:
            recorder.on = False

    def write(self) -> dict[str, Any] | None:
        """Write the file on the first rank; what there is to tell of it, there. None where no step was traced. All
        ranks call this, once."""
        engine, layout = self._engine, self._engine.layout
        mine = [[event.as_json() for event in run] for run in engine.recorder.runs]
        world = engine.world
        parts = all_gather_bytes(json.dumps(mine).encode(), world.everyone, world.device)
        ranks = tuple([[Event.read(values) for values in run] for run in json.loads(part)] for part in parts)
        if world.rank != 0 or not ranks[0]:
            return None
        grid, line, first = engine.mesh.grid, str(layout), self._first + 1
        trace = Trace(line, layout.schedule, layout.mb, pipelines_of(grid), first, ranks)
        names = [name_of(rank, grid) for rank in range(world.size)]
        self._path.write_text(json.dumps(to_chrome(trace, names)), encoding="utf-8")
        told: dict[str, Any] = {"path": str(self._path), "first": first, "steps": len(ranks[0])}
        if layout.asynchronous:  # no step ends by itself
            return told
        pipeline = [ranks[rank] for rank in trace.pipelines[0]]
        found = (compare(programs_of(step), step) for step in zip(*pipeline, strict=True))
        usual = typical(found, lambda one: one.took)
        late = [
            {"stage": stage, "pass": name, "ms": 1e3 * took, "late_ms": 1e3 * usually, "most_late_ms": 1e3 * most}
            for stage, name, took, usually, most in usual.by_stage()
        ]
        return told | {"passes_ms": 1e3 * usual.took, "simulated_ms": 1e3 * usual.expected, "late": late}


def pipelines_of(grid: Grid) -> tuple[tuple[int, ...], ...]:
    """The ranks of each pipeline of a mesh, in the order of its stages."""
    firsts = [grid.coords(rank) for rank in range(grid.size)]
    return tuple(tuple(grid.rank(place) for place in grid.vary(first, ("pp",))) for first in firsts if first["pp"] == 0)


def name_of(rank: int, grid: Grid) -> str:
    """A rank and where it stands on the axes along which there are several."""
    sizes = dict(grid.axes)
    places = ", ".join(f"{axis} {place}" for axis, place in grid.coords(rank).items() if sizes[axis] > 1)
    return f"rank {rank}" + (f" ({places})" if places else "")
