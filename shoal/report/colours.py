"""The colour of what a set of ranks holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

from shoal.report.ownership import Ownership
from shoal.report.svg import oklch

_GREY = "#d8dee6"
_BLUE = 255
_CIRCLE = ("tp", "col", "row", "b", "c", "a")
"""The mesh axes that weights are divided over, in the order in which they divide the circle of hues. The one that
divides hidden features comes first, so that ranks with the same features are of one family."""
_FEW = 8
"""Places whose hues alone tell them apart."""


class Colours:
    """The colour of what a set of ranks holds: a hue for each place on the tensor grid, paler for several places, grey
    for all of them, and lighter or darker by replica where replicas divide it. The depth of a 2.5-D grid counts as
    replicas, for its ranks hold the same. Without tensor parallelism replicas have the hues, and where they divide
    nothing, the places of the pipeline have."""

    def __init__(self, owned: Ownership) -> None:
        layout = owned.layout
        sizes = dict(layout.tensor_axes)
        self._sides = {axis: sizes[axis] for axis in _CIRCLE if sizes.get(axis, 1) > 1}
        self._grid, self._places, self._pipeline = owned.grid, prod(self._sides.values()), layout.pp
        self._of_the_pipeline = "the stages of each rank" if layout.chunks > 1 else "each stage"
        among = ("depth",) if owned.is_part else ("dp", "cp", "depth")
        self._alike = {axis: size for axis, size in owned.grid.axes if axis in among and size > 1}
        alike = prod(self._alike.values())
        self._replicas = min(layout.zero_group or alike, alike) if layout.zero or layout.servers else 1
        self._which = "that divide" if layout.zero else "of which the first serve"

    def of(self, ranks: Sequence[int]) -> str:
        coords = [self._grid.coords(rank) for rank in ranks]
        places = {tuple(place[axis] for axis in self._sides) for place in coords}
        replicas = {self._replica(place) for place in coords}
        every_place, every_replica = len(places) == self._places, len(replicas) == self._replicas
        if self._places == self._replicas == 1:
            return hue(coords[0]["pp"], self._pipeline)
        if every_place and every_replica:
            return _GREY
        if self._places == 1:
            return hue(min(replicas), self._replicas)
        shade = 0.5 if every_replica else (sum(replicas) / len(replicas) + 0.5) / self._replicas
        lightness = 0.92 - 0.24 * shade
        if every_place:
            return oklch(lightness, 0.012, _BLUE)
        turn, arc = self._arc(places)
        middle = turn + (arc - 1 / self._places) / 2  # counted from that of the first place
        return oklch(*_tone(len(places), turn / arc, 1 / arc, lightness), _BLUE + 360 * middle)

    def key(self) -> str:
        """What the colours say."""
        if self._places == self._replicas == 1:
            return f"a colour for {self._of_the_pipeline}" if self._pipeline > 1 else ""
        replica = " and ".join(dict.fromkeys("depth" if axis == "depth" else "replica" for axis in self._alike))
        if self._places == 1:
            return f"a colour for each of the {self._replicas} replicas {self._which}, grey for all of them"
        several = "paler for several, " * (self._places > 2)
        return f"a colour for each place on {' × '.join(self._named())}, {several}grey for all of them" + (
            f", lighter to darker by {replica}" if self._replicas > 1 else ""
        )

    def _named(self) -> list[str]:
        """The sides, outermost first."""
        return [axis for axis in self._grid.names if axis in self._sides]

    def _replica(self, place: dict[str, int]) -> int:
        number = 0
        for axis, size in self._alike.items():
            number = number * size + place[axis]
        return number % self._replicas

    def _arc(self, places: Collection[tuple[int, ...]]) -> tuple[float, float]:
        """Where their arc of the circle of hues begins and its length, from 0 to 1: an axis on which ``places`` are not
        everywhere divides what the axes before it have left."""
        turn, arc = 0.0, 1.0
        for at, size in zip(map(set, zip(*places, strict=True)), self._sides.values(), strict=True):
            if len(at) < size:
                arc /= size
                turn += arc * sum(at) / len(at)
        return turn, arc


def _tone(places: int, number: float, of: float, lightness: float) -> tuple[float, float]:
    """(lightness, chroma) of arc ``number`` of so many: paler for several places; neighbours among many differ."""
    chroma = 0.095 if places == 1 else 0.055
    if round(of) <= _FEW:
        return lightness, chroma
    return (lightness + 0.03, 0.8 * chroma) if round(number) % 2 else (lightness - 0.03, 1.2 * chroma)


def hue(place: int, places: int) -> str:
    """The colour of one of so many places. Neighbours among many differ in lightness too."""
    lightness = 0.82 if places <= _FEW or place % 2 else 0.9
    return oklch(lightness, 0.09, _BLUE + 360 * place / places)
