"""The memory of one step on every rank, by phase and by what it is for: measured, kept in a file, read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.purposes import HOST

if TYPE_CHECKING:
    from shoal.meter import Meter

MEMORY = "memory.json"
"""What it is called in the folder of a run."""

BEFORE, FORWARD, BACKWARD, UPDATE = PHASES = ("before the first step", "forward", "backward", "update")
"""Before the first step there is what stays from step to step. The passes of a pipeline alternate: then a phase is all
of its passes, with the messages that they take in and send."""

Bytes = Mapping[str, int]


@dataclass(frozen=True)
class Moment:
    """When a phase held most on the device: bytes by category, of :mod:`shoal.meter`, which is all there was.
    ``on_host`` is when it held most off the device, by what that is for."""

    device: Bytes
    on_host: Bytes

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    @property
    def host(self) -> int:
        """Bytes off the device."""
        return sum(self.on_host.values())


@dataclass(frozen=True)
class RankMemory:
    """One rank's, called by its name; by phase, those that it went through."""

    name: str
    phases: Mapping[str, Moment]

    @property
    def highest(self) -> str:
        """The phase that held most."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    def as_json(self) -> dict[str, Any]:
        phases = {
            phase: {"total": moment.total, "device": dict(moment.device), HOST: dict(moment.on_host)}
            for phase, moment in self.phases.items()
        }
        return {"name": self.name, "phases": phases}


@dataclass(frozen=True)
class Memory:
    """That of step number ``step``, counted from 1, of a run under ``layout``, its layout in one line."""

    layout: str
    step: int
    ranks: tuple[RankMemory, ...]

    @property
    def moments(self) -> Iterator[Moment]:
        return (moment for rank in self.ranks for moment in rank.phases.values())

    def as_json(self) -> dict[str, Any]:
        """The file."""
        ranks = [rank.as_json() for rank in self.ranks]
        return {"layout": self.layout, "step": self.step, "unit": "bytes", "ranks": ranks}


def measured(meter: Meter, before: Moment, name: str) -> RankMemory:
    """What ``meter`` has seen of the phases of a step, whose beginning was ``before`` the first one."""
    peaks = meter.peaks()
    found = {phase: _moment(peaks[phase], meter.host_parts(phase)) for phase in PHASES[1:] if phase in peaks}
    return RankMemory(name, {BEFORE: before} | found)


def now(meter: Meter) -> Moment:
    """What there is at this moment."""
    meter.look()
    return _moment(meter.snapshot(), meter.host_parts())


def _moment(held: Bytes, on_host: Bytes) -> Moment:
    return Moment({category: nbytes for category, nbytes in held.items() if category != HOST}, on_host)


def read_rank(document: Any) -> RankMemory:
    """What :meth:`RankMemory.as_json` has made a document of."""
    phases = {}
    for phase in (phase for phase in PHASES if phase in document["phases"]):
        values = document["phases"][phase]
        device, host = ({str(one): int(n) for one, n in values[place].items()} for place in ("device", HOST))
        moment = Moment(device, host)
        if moment.total != values["total"]:
            raise ValueError(f"{document['name']}, {phase}: its parts are {moment.total} bytes of {values['total']}")
        phases[phase] = moment
    return RankMemory(str(document["name"]), phases)


def read(document: Any) -> Memory:
    """What :meth:`Memory.as_json` has made a file of. Raises ``ValueError`` where ``document`` is none of its."""
    try:
        ranks = tuple(read_rank(rank) for rank in document["ranks"])
        found = Memory(str(document["layout"]), int(document["step"]), ranks)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not what shoal train --memory writes: {type(error).__name__} {error}") from None
    if not ranks or not all(rank.phases for rank in ranks):
        raise ValueError("some rank has no phase")
    return found
