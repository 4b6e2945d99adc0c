"""What a rank may hold on its device: ``memory.budget_gib``, and what ``offload=optimizer:cpu`` takes away for it.

Nothing is guessed. Two steps are taken with an engine that is thrown away, under the meter (on a GPU, its allocator
counts): the first brings every buffer into being, the second is recorded. All that is asked for is away then, and what
the record leaves of the budget is what may stay.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import replace
from math import ceil

import torch

from shoal.comm.collectives import all_reduce
from shoal.comm.world import World
from shoal.config import Config
from shoal.engine import Engine
from shoal.errors import ConfigError, setting
from shoal.layout import Layout, Offload
from shoal.layout.kinds import HALVES
from shoal.meter import HOST, Meter, cuda_peak
from shoal.train.setup import Source, make_engine

_GIB = 2**30
_PARTS = 1000
"""Fractions are whole thousandths: all ranks take the same one."""


def within_budget(config: Config, layout: Layout, world: World, source: Source) -> Layout:
    """The ``layout`` of a run, filled in: with a budget, of the optimizer states that it has on the host
    (``optimizer:cpu`` without a fraction) only as many go there as must. All ranks call this.

    Raises :class:`ConfigError`, the same on every rank, where a step does not fit.
    """
    if config.memory.budget_gib is None:
        return layout
    budget = config.memory.budget_gib * _GIB
    peak, away = _record(config, layout, world, source)
    most = torch.tensor([peak], dtype=torch.int64, device=world.device)
    all_reduce(most, world.everyone, "budget", "max")
    if most.item() > budget:
        needs = ceil(most.item() / _GIB * 1000) / 1000
        problem = f"a step takes {most.item() / _GIB:.3f} GiB on the device of the rank that needs most"
        legal = f"use {needs} or more, or take more off the device: {', '.join(_more(layout))}"
        raise ConfigError(setting("memory.budget_gib", config.memory.budget_gib, problem, legal))
    share = max(0.0, 1 - (budget - peak) / away) if away else 0.0
    parts = torch.tensor([ceil(share * _PARTS)], dtype=torch.int64, device=world.device)
    all_reduce(parts, world.everyone, "budget", "max")
    return replace(layout, offload=tuple(_shares(layout.offload, parts.item() / _PARTS)))


def _record(config: Config, layout: Layout, world: World, source: Source) -> tuple[int, int]:
    """Bytes on the device at the peak of a step, and of the masters and optimizer states that are on the host."""
    engine = make_engine(config, layout, world)  # which makes the model of tensors that only stand for some
    with Meter(apart=[HOST]) as meter:
        _step(engine, source)
        meter.label("model states", (one.tensor for one in engine.fragments()))
        meter.label(HOST, engine.on_host())
        if cuda := world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        with meter.phase("recorded"):
            _step(engine, source)
        peak = cuda_peak(world.device) if cuda else meter.peak("recorded")
        # In full precision parameters are masters where both are on the device.
        mixed = layout.dtype in HALVES and config.optimizer.rounding == "nearest"
        away = sum(one.tensor.nbytes for one in engine.fragments() if mixed or one.kind != "weight")
    del engine
    gc.collect()  # a second one is about to be made
    return peak, away


def _step(engine: Engine, source: Source) -> None:
    engine.step(source.batch(0, engine.mesh.coords["dp"], engine.layout.dp))
    engine.drain()


def _shares(parts: Iterable[Offload], fraction: float) -> Iterable[Offload]:
    for part in parts:
        if (part.what, part.where, part.fraction) != ("optimizer", "cpu", 1.0):
            yield part
        elif fraction > 0:
            yield replace(part, fraction=fraction)


def _more(layout: Layout) -> list[str]:
    """What would take memory off the device that the layout leaves there."""
    away = {part.what for part in layout.offload if part.fraction == 1.0}
    may = ["activations"] if layout.sync == "server" else ["optimizer", "activations"]
    divides = layout.sync != "server" and not layout.asynchronous
    found = [f"offload={what}:cpu" for what in [*may, *(("params", "grads") if divides else ())] if what not in away]
    found += ["recompute=full"] * (layout.recompute != "full")
    found += ["zero=3"] * (divides and layout.zero < 3 and layout.dp > 1)
    return [*found, f"mb={2 * layout.mb}"]
