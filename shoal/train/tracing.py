"""A trace of some steps of a run, from all ranks, in one file; and how far they were from the simulation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from shoal.build import passes_of
from shoal.comm.collectives import all_gather_bytes
from shoal.engine import Engine
from shoal.mesh import Grid
from shoal.pipeline.lower import lower
from shoal.pipeline.trace import Event, chrome_trace, compare

TRACE = "trace.json"
WARM, TRACED = 2, 3
"""Steps that make memory and connections ready, and those after them that are traced."""


class Tracing:
    """Has ``engine`` write down the steps after the next :data:`WARM`, or the last of ``left`` where there are no more,
    and puts them in a file of ``folder``."""

    def __init__(self, engine: Engine, folder: Path, left: int) -> None:
        self._engine, self._path = engine, folder / TRACE
        self._first = engine.steps_done + max(0, min(WARM, left - 1))

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """For step number ``step``, counted from 0."""
        recorder = self._engine.recorder
        recorder.on = self._first <= step < self._first + TRACED
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
        ranks = [[[Event.read(values) for values in run] for run in json.loads(part)] for part in parts]
        if world.rank != 0 or not ranks[0]:
            return None
        names = [_name(rank, engine.mesh.grid) for rank in range(world.size)]
        trace = chrome_trace(ranks, names, self._first + 1)
        self._path.write_text(json.dumps(trace), encoding="utf-8")
        told: dict[str, Any] = {"path": str(self._path), "first": self._first + 1, "steps": len(ranks[0])}
        if layout.asynchronous:  # no step ends by itself
            return told
        pipeline = [ranks[rank] for rank in engine.mesh.over("pp").ranks]
        programs = lower(passes_of(layout))
        found = [compare(programs, steps) for steps in zip(*pipeline, strict=True)]
        usual = sorted(found, key=lambda one: one.took)[len(found) // 2]
        late = [
            {"stage": stage, "pass": name, "ms": 1e3 * took, "late_ms": 1e3 * usually, "most_late_ms": 1e3 * most}
            for stage, name, took, usually, most in usual.by_stage()
        ]
        took, expected = (1e3 * median(getattr(one, name) for one in found) for name in ("took", "expected"))
        return told | {"passes_ms": took, "simulated_ms": expected, "late": late}


def _name(rank: int, grid: Grid) -> str:
    """A rank and where it stands on the axes along which there are several."""
    sizes = dict(grid.axes)
    places = ", ".join(f"{axis} {place}" for axis, place in grid.coords(rank).items() if sizes[axis] > 1)
    return f"rank {rank}" + (f" ({places})" if places else "")
