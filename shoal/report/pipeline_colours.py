"""The colours of passes: a hue for each kind, and paler the later the stage is among those of its rank."""

from __future__ import annotations

from typing import NamedTuple

from shoal.pipeline.program import Op
from shoal.report.svg import oklch

_HUES = {
    Op.FORWARD: (0.135, 255.0),
    Op.BACKWARD: (0.15, 32.0),
    Op.INPUT_GRADIENT: (0.115, 75.0),
    Op.WEIGHT_GRADIENT: (0.105, 160.0),
}
"""Chroma and hue."""
WORDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_GRADIENT: "backward, for the input",
    Op.WEIGHT_GRADIENT: "backward, for the weights",
}


class Theme(NamedTuple):
    """Lightness, from 0 to 1, of a rank's only stage, of the first of several and of the last."""

    only: float
    first: float
    last: float


LIGHT, DARK = Theme(0.54, 0.54, 0.86), Theme(0.66, 0.78, 0.44)
"""On white paper, and on black."""
_INKS = ("#ffffff", "#0d1117")


class Tone(NamedTuple):
    """A pass's fill, and the ink of what is written on it."""

    fill: str
    ink: str


def tone(op: Op, chunk: int, chunks: int, theme: Theme, shift: float = 0.0) -> Tone:
    """Of a pass through stage ``chunk`` of the ``chunks`` of its rank; ``shift`` makes it lighter."""
    lightness = theme.only
    if chunks > 1:
        lightness = theme.first + chunk / (chunks - 1) * (theme.last - theme.first)
    lightness += shift
    chroma, hue = _HUES[op]
    paler = chroma * (1 - 0.35 * max(lightness - 0.7, 0) / 0.2)  # few colours are both pale and strong
    fill = oklch(lightness, paler, hue)
    return Tone(fill, max(_INKS, key=lambda ink: contrast(ink, fill)))


def contrast(one: str, other: str) -> float:
    """Of two colours ``#rrggbb``, from 1 to 21 (WCAG 2)."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    red, green, blue = (_linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)
