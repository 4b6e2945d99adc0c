"""The colour of what a set of ranks holds."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.report.ownership import Ownership
from shoal.report.svg import oklch

_GREY = "#d8dee6"
_BLUE = 255


class Colours:
    """The colour of what a set of ranks holds: a hue for each place on the tensor axis, lighter or darker by replica
    where replicas divide it; grey for all places. Without tensor parallelism replicas have the hues, and where they
    divide nothing, stages have."""

    def __init__(self, owned: Ownership) -> None:
        layout = owned.layout
        self._grid, self._tensor, self._stages = owned.grid, layout.tp, layout.pp
        divided = layout.zero and not owned.is_part
        self._replicas = (layout.zero_group or owned.replicas) if divided else 1

    def of(self, ranks: Sequence[int]) -> str:
        places = [self._grid.coords(rank) for rank in ranks]
        parts, replicas = {place["tp"] for place in places}, {self._replica(place) for place in places}
        every_part, every_replica = len(parts) == self._tensor, len(replicas) == self._replicas
        if self._tensor == self._replicas == 1:
            return _hue(places[0]["pp"], self._stages)
        if every_part and every_replica:
            return _GREY
        if self._tensor == 1:
            return _hue(min(replicas), self._replicas)
        shade = 0.5 if every_replica else (min(replicas) + 0.5) / self._replicas
        lightness = 0.92 - 0.24 * shade
        if every_part:
            return oklch(lightness, 0.012, _BLUE)
        return oklch(lightness, 0.095, _BLUE + 360 * sum(parts) / len(parts) / self._tensor)

    def key(self) -> str:
        """What the colours say."""
        if self._tensor == self._replicas == 1:
            return "a colour for each stage" if self._stages > 1 else ""
        if self._tensor == 1:
            return f"a colour for each of the {self._replicas} replicas that divide, grey for all of them"
        return "a colour for each place on tp, grey for all of them" + (
            ", lighter to darker by replica" if self._replicas > 1 else ""
        )

    def _replica(self, place: dict[str, int]) -> int:
        return (place["dp"] * dict(self._grid.axes)["cp"] + place["cp"]) % self._replicas


def _hue(place: int, places: int) -> str:
    """Neighbours among many differ in lightness too."""
    lightness = 0.82 if places <= 8 or place % 2 else 0.9
    return oklch(lightness, 0.09, _BLUE + 360 * place / places)
