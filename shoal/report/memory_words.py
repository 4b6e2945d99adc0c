"""What a step holds, in words: what there is, how much, and where to look next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.memory.account import Memory, Moment
from shoal.purposes import ACTIVATIONS, BUFFERS, COMMUNICATION, GRADIENTS, LOGITS, PARAMETERS, STATES
from shoal.sizes import Unit, unit_for

OTHER = "other"
WORDS = {
    PARAMETERS: "parameters",
    GRADIENTS: "gradients",
    STATES: "optimizer states, with masters",
    ACTIVATIONS: "activations",
    LOGITS: "logits",
    COMMUNICATION: "communication",
    OTHER: "other: gradients of activations, the batch, scratch",
}
"""The parts of a bar, from its left, and what they are."""
HOST_WORDS = "dashed: on the host, at the moment of the phase that had most there"
HOST_PARTS = (PARAMETERS, GRADIENTS, STATES, ACTIVATIONS, BUFFERS)

SHOWN = 16
"""Ranks at most."""


def parts(moment: Moment) -> dict[str, int]:
    """The bytes of each part, in the order of :data:`WORDS`; together they are all there was."""
    known = {name: moment.device.get(name, 0) for name in WORDS}
    return known | {OTHER: moment.total - sum(known.values())}


def host_parts(moment: Moment) -> dict[str, int]:
    """The bytes on the host of each part, in the order of :data:`HOST_PARTS`; together they are all there was."""
    known = {name: moment.on_host.get(name, 0) for name in HOST_PARTS}
    return known | {BUFFERS: moment.host - sum(known.values()) + known[BUFFERS]}


def unit_of(memory: Memory) -> Unit:
    """The largest of which there are some."""
    return unit_for(_most(memory))


def shown(memory: Memory) -> list[int]:
    """The ranks to show: all, or of many those that held most."""

    def most(rank: int) -> int:
        one = memory.ranks[rank]
        return one.phases[one.highest].total

    return sorted(sorted(range(len(memory.ranks)), key=most, reverse=True)[:SHOWN])


def headline(memory: Memory) -> str:
    """``memory of step 2: at most 15.6 MiB on a device``."""
    unit = unit_of(memory)
    return f"memory of step {memory.step}: at most {unit.of(_most(memory))} {unit.name} on a device"


def what_it_is_of(memory: Memory, those: Sequence[int]) -> str:
    """The layout, and how many of its ranks are shown."""
    count = len(memory.ranks)
    ranks = f"{count} rank" + "s" * (count > 1)
    return f"layout {memory.layout}, {ranks}" + f", the {len(those)} that held most" * (len(those) < count)


def what_is_measured() -> str:
    return "measured: everything alive at the moment of each phase at which a rank held most"


def has_host(memory: Memory) -> bool:
    return any(moment.host for moment in memory.moments)


def title(rank: str, phase: str, part: str, nbytes: int, moment: Moment, unit: Unit) -> str:
    """What a part of a bar is, for whoever points at it."""
    share = f", {nbytes / moment.total:.1%} of {unit.of(moment.total)} {unit.name}"
    return f"{rank}, {phase}: {WORDS[part]}, {unit.of(nbytes)} {unit.name}{share}"


def host_title(rank: str, phase: str, part: str, nbytes: int, moment: Moment, unit: Unit) -> str:
    """What a part of a bar that is on the host is."""
    share = f", {nbytes / moment.host:.1%} of {unit.of(moment.host)} {unit.name}"
    return f"{rank}, {phase}: on the host, {WORDS.get(part, part)}, {unit.of(nbytes)} {unit.name}{share}"


def next_steps(memory: Memory, run: Path, *, drawn: bool) -> Iterator[tuple[str, str]]:
    """(what for, command)."""
    folder = run if run.is_dir() else run.parent
    if not drawn:
        yield "a picture of this", f"shoal report {_quoted(run)} --memory --out {_quoted(folder / 'memory.svg')}"
    largest = _largest(memory)
    file, again = _quoted(folder / "run.toml"), f"--set run.name={folder.resolve().name}-less --memory"
    line = memory.layout
    less = {
        ACTIVATIONS: ("recompute=full", "recompute"),
        STATES: ("zero=1", "zero"),
        GRADIENTS: ("zero=2", "zero"),
        PARAMETERS: ("zero=3", "zero"),
    }
    if largest == ACTIVATIONS and "recompute" in line:
        less[ACTIVATIONS] = ("offload=activations:cpu", "offload")
    option, key = less.get(largest, ("", ""))
    possible = key in ("recompute", "offload") or "dp=" in line
    if option and possible and f"{key}=" not in line:
        yield f"less for {largest}", f"shoal train {file} --layout {shlex.quote(f'{line},{option}')} {again}"


def _most(memory: Memory) -> int:
    return max(moment.total for moment in memory.moments)


def _largest(memory: Memory) -> str:
    """The part that is most of the largest bar."""
    moment = max(memory.moments, key=lambda one: one.total)
    found = parts(moment)
    return max(found, key=lambda part: found[part])


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
