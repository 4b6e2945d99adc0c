"""What a rank may hold on its device: ``memory.budget_gib``, and what ``offload=optimizer:cpu`` takes away for it.

Nothing is guessed. Two steps are taken with an engine that is thrown away, under the meter (on a GPU, its allocator
counts): the first brings every buffer into being, the second is recorded. All that is asked for is away then, and what
the record leaves of the budget is what may stay. Where it leaves nothing, layouts that take less are recorded in the
same way until one fits, what costs least first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil
from typing import NamedTuple

import torch

from shoal.comm.collectives import all_reduce
from shoal.comm.world import World
from shoal.config import Config
from shoal.engine import Engine
from shoal.errors import ConfigError, ShoalError, setting
from shoal.layout import Layout, Offload
from shoal.layout.kinds import HALVES
from shoal.layout.text import value_text
from shoal.meter import HOST, Meter, cuda_peak
from shoal.sizes import size_text
from shoal.train.setup import Source, fit, make_engine

_GIB = 2**30
_PARTS = 1000
"""Fractions are whole thousandths: all ranks take the same one."""


class Within(NamedTuple):
    """A layout that fits a budget, and what it takes: ``peak``, the most bytes that a rank's device holds in a step;
    None without a budget, of which nothing is known."""

    layout: Layout
    peak: int | None = None


def within_budget(config: Config, layout: Layout, world: World, source: Source) -> Within:
    """The ``layout`` of a run, filled in: with a budget, of the optimizer states that it has on the host
    (``optimizer:cpu`` without a fraction) only as many go there as must. All ranks call this.

    Raises :class:`ConfigError`, the same on every rank, where a step does not fit.
    """
    if config.memory.budget_gib is None:
        return Within(layout)
    budget = config.memory.budget_gib * _GIB
    peak, away = _record(config, layout, world, source)
    if (most := _most(peak, world)) > budget:
        raise _refusal(config, layout, world, source, most)
    share = max(0.0, 1 - (budget - peak) / away) if away and _flexible(layout.offload) else 0.0
    share = _most(ceil(share * _PARTS), world) / _PARTS
    if _flexible(layout.offload):
        layout = replace(layout, offload=tuple(_shares(layout.offload, share)))
        peak += round((1 - share) * away)
    return Within(layout, _most(peak, world))


def _most(number: int, world: World) -> int:
    """The largest of all ranks'."""
    found = torch.tensor([number], dtype=torch.int64, device=world.device)
    all_reduce(found, world.everyone, "budget", "max")
    return int(found.item())


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
    gc.collect()  # another is about to be made
    return peak, away


def _step(engine: Engine, source: Source) -> None:
    engine.step(source.batch(0, engine.mesh.coords["dp"], engine.layout.dp))
    engine.drain()


def _is_flexible(part: Offload) -> bool:
    return (part.what, part.where, part.fraction) == ("optimizer", "cpu", 1.0)


def _flexible(parts: Iterable[Offload]) -> bool:
    """Whether a part of the states may stay on the device."""
    return any(map(_is_flexible, parts))


def _shares(parts: Iterable[Offload], fraction: float) -> Iterator[Offload]:
    for part in parts:
        if not _is_flexible(part):
            yield part
        elif fraction > 0:
            yield replace(part, fraction=fraction)


def _refusal(config: Config, layout: Layout, world: World, source: Source, most: int) -> ConfigError:
    """A step takes ``most``: what takes less, as measured, up to the first layout that fits."""
    budget, lowest, found, fits = config.memory.budget_gib, most, [], False
    assert budget is not None
    for key, change in _LESS:
        changed = layout
        with suppress(ShoalError):  # it is not for this layout, model or batch
            changed = fit(config, change(layout), world.size)
        if changed == layout:
            continue
        needs = _most(_record(config, changed, world, source)[0], world)
        if needs < lowest:
            layout, lowest, fits = changed, needs, needs <= budget * _GIB
            found.append((f"{key}={value_text(layout, key)}", size_text(needs) + ", which fits" * fits))
            if fits:
                break
    problem = f"a step takes {size_text(most)} on the device of the rank that needs most"
    legal = f"use {ceil(most / _GIB * 10**4) / 10**4:g} or more"
    error = ConfigError(setting("memory.budget_gib", budget, problem, legal + f", or --layout {layout}" * fits))
    if found:
        width = 2 + max(len(what) for what, _ in found)
        lines = [f"  {what:<{width}}{needs}" for what, needs in found]
        error.add_note("\n".join(["What it takes, measured, each with those before it:", *lines]))
    return error


def _away(layout: Layout, what: str) -> Layout:
    """``layout`` with all of ``what`` on the host, unless it is on a disk."""
    if Offload(what, "nvme") in layout.offload:
        return layout
    others = [part for part in layout.offload if part.what != what]
    return replace(layout, offload=(*others, Offload(what, "cpu")))


def _divided(layout: Layout, stage: int) -> Layout:
    return layout if layout.zero >= stage or layout.alike == 1 else replace(layout, zero=stage)


_LESS: tuple[tuple[str, Callable[[Layout], Layout]], ...] = (
    ("zero", lambda layout: _divided(layout, 1 if layout.asynchronous else 2)),
    ("mb", lambda layout: replace(layout, mb=2 * layout.mb)),
    ("recompute", lambda layout: replace(layout, recompute="full")),
    ("zero", lambda layout: _divided(layout, 3)),
    *(("offload", partial(_away, what=what)) for what in ("activations", "optimizer", "params", "grads")),
)
"""What makes a step take less on the device, by what it costs: the words of ZeRO-2 are an all-reduce's."""
