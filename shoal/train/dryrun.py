"""One rank of a job of any size, in this process: the real engine, among ranks that are not there, on tensors without
memory.

Nothing of what a job does is written a second time. The run file's model is built, placed, cut and sharded by
:class:`~shoal.engine.Engine`, and its steps run by the Program; what is different is what tensors are
(:mod:`~shoal.train.stand_ins`) and who carries messages (:mod:`shoal.comm.alone`). So the meter counts what it would
count, the ledger what it would be told, and what would fail fails here.

What a stage receives has a form that the stage before it tells. Between the layers of a decoder all forms are alike, so
the first stage is asked, of a model that has no more layers than there are stages.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.comm.alone import Alone
from shoal.comm.ledger import Entry
from shoal.config import Config
from shoal.data.batches import Batch, Synthetic
from shoal.errors import LayoutError, setting
from shoal.layout import Layout
from shoal.memory.account import RankMemory
from shoal.mesh import Grid
from shoal.pipeline.program import Act
from shoal.train.metering import Metering, step_measured
from shoal.train.setup import batch_size, make_engine
from shoal.train.stand_ins import StandIns

Progress = Callable[[str, int, int], None]
"""(what is being done, how much is done, of how much)."""


_OF_THE_FIRST = ("start", "boundary header")
"""The purposes of words that are received in the first step alone."""


def _silent(*_: object) -> None:
    pass


@dataclass(frozen=True)
class DryRun:
    """What the step number ``step``, counted from 1, of rank ``rank`` takes under ``layout``, its layout in one line:
    ``memory`` on the device, ``received`` from other ranks, and the ``actions`` of its Program. ``even_load`` where the
    model has experts, which are taken to have as many tokens each."""

    layout: str
    world: int
    rank: int
    step: int
    memory: RankMemory
    received: tuple[Entry, ...]
    actions: tuple[Act, ...]
    even_load: bool = False

    @property
    def peak_bytes(self) -> int:
        """The most that the rank holds on its device at a time."""
        return self.memory.phases[self.memory.highest].total

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "world": self.world,
            "rank": self.rank,
            "step": self.step,
            "even_load": self.even_load,
            "peak_bytes": self.peak_bytes,
            "memory": self.memory.as_json(),
            "collectives": [entry._asdict() for entry in self.received],
            "actions": [str(act) for act in self.actions],
        }


def dryrun(config: Config, layout: Layout, rank: int, seen: Progress = _silent) -> DryRun:
    """Run rank ``rank`` of ``layout``, which has been filled in and fits (:func:`~shoal.train.setup.fit`), for
    :func:`steps_of` steps, of as many samples as any step has, and tell of the last.

    Raises :class:`~shoal.errors.LayoutError` where there is no such rank or the layout takes something elsewhere that
    is not there, and whatever else the job would end with.
    """
    check(layout, rank)
    coords = Grid(layout.axes).coords(rank)
    form = form_between(config, layout, Grid(layout.axes).rank({**coords, "pp": 0})) if coords["pp"] else []
    steps, source = steps_of(layout), samples_of(config)
    with _world(layout, rank, form) as world:
        metering = Metering(Path())
        seen("building", 0, 1)
        with metering.building():
            engine = make_engine(config, layout, world)
        seen("building", 1, 1)
        batch = source(coords["dp"], layout.dp)
        metering.begin(engine, steps)
        for step in range(steps):
            seen("steps", step, steps)
            world.ledger.clear()
            engine.recorder.on = step == steps - 1
            with metering.around(step):
                engine.step(batch)
        seen("steps", steps, steps)
        assert metering.found is not None, "the last step was measured"
        actions = tuple(event.act for run in engine.recorder.runs for event in run)
        entries = tuple(entry for entry in world.ledger.entries() if entry.purpose not in _OF_THE_FIRST)
        even_load = config.model.experts > 0
        return DryRun(str(engine.layout), layout.ranks, rank, steps, metering.found, entries, actions, even_load)


def steps_of(layout: Layout) -> int:
    """How many steps it takes to come to one that is like all later ones: a single one, but where steps overlap, or the
    host's memory grows to what is lent at a time. What a first one has besides, ranks tell each other in a few
    words."""
    return step_measured(layout) + 1 if layout.delayed or layout.offload else 1


def check(layout: Layout, rank: int) -> None:
    """Raises :class:`~shoal.errors.LayoutError` where ``rank`` cannot be run dry under ``layout``."""
    if not 0 <= rank < layout.ranks:
        raise LayoutError(
            setting("--rank", rank, f"the world has {layout.ranks:,} ranks", f"use 0 to {layout.ranks - 1}")
        )
    for part in layout.offload:
        if part.where == "nvme":
            problem = "a dry run has no disk to write to"
            raise LayoutError(setting("layout.offload", part, problem, f"use {part.what}:cpu, which frees as much"))


def form_between(config: Config, layout: Layout, rank: int) -> list[int]:
    """What ``rank``, of the first stage, tells the next about what it hands over."""
    told: list[int] = []

    def sent(numbers: Tensor) -> None:
        told[:] = numbers.tolist()
        raise _Told

    shallow = config.model_copy(update={"model": config.model.model_copy(update={"layers": layout.stages})})
    with _world(layout, rank, [], sent) as world:
        engine = make_engine(shallow, layout, world)
        batch = samples_of(config)(engine.mesh.coords["dp"], layout.dp)
        with suppress(_Told):
            engine.step(batch)
    return told


class _Told(Exception):
    """The rest of a step does not matter."""


@contextmanager
def _world(layout: Layout, rank: int, form: list[int], sent: Callable[[Tensor], None] | None = None) -> Iterator[Alone]:
    """A rank's, in which every stage hands over what has the ``form``; what this one hands over has it, too."""
    known = list(form)

    def own(numbers: Tensor) -> None:
        known[:] = numbers.tolist()

    def fill(numbers: Tensor) -> None:
        assert len(numbers) == len(known), "who receives is not of the first stage, or has sent before"
        numbers.copy_(torch.tensor(known))

    with StandIns(), Alone(rank, layout.ranks, sent=sent or own, wanted=fill) as world:
        yield world
    gc.collect()


def samples_of(config: Config) -> Callable[[int, int], Batch]:
    """Random samples in the form of those of the run file, which need no file: (part, parts) of a step."""
    data, size = config.data, max(batch_size(config).sizes())
    source = Synthetic(vocab=config.model.vocab, seq_len=data.seq_len, batch=size, seed=2 * config.run.seed)

    def samples(part: int, parts: int) -> Batch:
        batch = source.batch(0, part, parts)
        if data.source == "tokens" and data.documents:
            batch["documents"] = torch.zeros_like(batch["tokens"])
        return batch

    return samples
