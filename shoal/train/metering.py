"""The memory of one step of a run, on all ranks, in one file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from shoal.comm.collectives import all_gather_bytes
from shoal.engine import Engine
from shoal.layout import Layout
from shoal.memory.account import BACKWARD, FORWARD, MEMORY, UPDATE, Memory, RankMemory, measured, now, read_rank
from shoal.meter import Meter
from shoal.pipeline.program import Act, Op
from shoal.train.tracing import name_of

_PHASE_OF: Mapping[Op, str] = {
    **dict.fromkeys((Op.FORWARD, Op.RECEIVE_ACTIVATION, Op.SEND_ACTIVATION, Op.DROP_ACTIVATION), FORWARD),
    **dict.fromkeys((Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT), BACKWARD),
    **dict.fromkeys((Op.RECEIVE_GRADIENT, Op.SEND_GRADIENT, Op.DROP_GRADIENT), BACKWARD),
    **dict.fromkeys((Op.REDUCE, Op.NORM, Op.UPDATE), UPDATE),
}
"""The phase of each action that has one."""

_WARM = 1
"""Steps after which there is all that stays."""


def step_measured(layout: Layout) -> int:
    """Which step of a run is measured, counted from 0 where it begins or goes on: where steps overlap, one in which the
    pipeline is full."""
    return max(_WARM, -(-layout.pp // layout.mb)) if layout.asynchronous else _WARM


class Metering:
    """Has a meter count while an engine is built and in the step that :func:`step_measured` names, or the last of those
    that are left where there are no more; what it found goes into a file of ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._path, self._meter = folder / MEMORY, Meter(meta=False)
        self._step = -1
        self.found: RankMemory | None = None
        """Of this rank, once the step is over."""

    def building(self) -> AbstractContextManager[object]:
        """While the engine is built, whose memory this is about."""
        return self._meter

    def begin(self, engine: Engine, left: int) -> None:
        """The ``engine`` has ``left`` steps to go."""
        self._engine, self._before = engine, now(self._meter)
        self._step = engine.steps_done + max(0, min(step_measured(engine.layout), left - 1))

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """For step number ``step``, counted from 0."""
        if step != self._step:
            yield
            return
        engine = self._engine
        engine.recorder.within = self._phase
        try:
            with self._meter:
                self._meter.look()
                yield
        finally:
            engine.recorder.within = None
        self.found = measured(self._meter, self._before, name_of(engine.world.rank, engine.mesh.grid))

    def _phase(self, act: Act) -> AbstractContextManager[None]:
        phase = _PHASE_OF.get(act.op)
        return nullcontext() if phase is None else self._meter.phase(phase)

    def write(self) -> dict[str, Any] | None:
        """Write the file on the first rank; what there is to tell of it, there. None where no step was measured. All
        ranks call this, once."""
        world, found = self._engine.world, self.found
        mine = json.dumps(found.as_json() if found is not None else None)
        parts = [json.loads(part) for part in all_gather_bytes(mine.encode(), world.everyone, world.device)]
        if world.rank != 0 or found is None:
            return None
        memory = Memory(str(self._engine.layout), self._step + 1, tuple(map(read_rank, parts)))
        self._path.write_text(json.dumps(memory.as_json(), indent=1), encoding="utf-8")
        number, most = max(enumerate(memory.ranks), key=lambda pair: pair[1].phases[pair[1].highest].total)
        told = {"path": str(self._path), "step": memory.step, "rank": number, "phase": most.highest}
        moment = most.phases[most.highest]
        return told | {"bytes": moment.total, "host_bytes": moment.host, "parts": dict(moment.device)}
