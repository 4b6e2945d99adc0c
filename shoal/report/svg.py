"""A small canvas for pictures that stand alone: no fonts, scripts or styles from elsewhere."""

from __future__ import annotations

from html import escape
from math import cos, pi, sin

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
INK, MUTED, FAINT, RIM = "#1f2328", "#57606a", "#d0d7de", "#8c959f"
PAPER, CARD = "#ffffff", "#f6f8fa"

# Widths in em, of the widest font that is likely; what is told to fit then fits in the others.
_NARROW, _DIGIT, _CAPITAL, _LOWER = 0.36, 0.64, 0.72, 0.61


class Canvas:
    """Shapes, in the order in which they are drawn; coordinates are pixels."""

    def __init__(self) -> None:
        self._shapes: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, rim: str = "", round_: int = 0
    ) -> None:
        """A rectangle; without a ``rim`` its edges are sharp, so that neighbours leave no seam."""
        edge = f' stroke="{rim}"' if rim else ' shape-rendering="crispEdges"'
        corner = f' rx="{round_}"' if round_ else ""
        self._shapes.append(f'<rect {_box(x, y, width, height)} fill="{fill}"{edge}{corner}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> None:
        ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
        self._shapes.append(f'<line {ends} stroke="{colour}" stroke-width="{_n(width)}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 11,
        *,
        colour: str = INK,
        anchor: str = "start",
        bold: bool = False,
        turned: bool = False,
    ) -> None:
        """``words`` with their baseline at ``y``; ``turned`` reads upwards through (x, y)."""
        style = f'font-size="{_n(size)}" fill="{colour}"'
        style += f' text-anchor="{anchor}"' * (anchor != "start") + ' font-weight="600"' * bold
        style += f' transform="rotate(-90 {_n(x)} {_n(y)})"' * turned
        self._shapes.append(f'<text x="{_n(x)}" y="{_n(y)}" {style}>{escape(words)}</text>')

    def add(self, other: Canvas) -> None:
        """Put the shapes of ``other`` on top."""
        self._shapes += other._shapes

    def document(self, width: float, height: float, label: str) -> str:
        """The picture on paper of its own, so that it can lie on any background. ``label`` says what it shows."""
        size = f'viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}" '
        head += f'font-family="{FONT}">'
        paper = f'<rect {_box(0, 0, width, height)} fill="{PAPER}" rx="10"/>'
        return "\n".join([head, f"<title>{escape(label)}</title>", HATCH, paper, *self._shapes, "</svg>", ""])


HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="6" height="6" fill="{CARD}"/><line x1="0" y1="0" x2="0" y2="6" stroke="{FAINT}" stroke-width="2"/>'
    "</pattern></defs>"
)
"""The fill ``url(#hatch)``: what is not there."""


def text_width(words: str, size: float, *, bold: bool = False) -> float:
    """At least the width of ``words`` in pixels."""
    return size * (1.08 if bold else 1) * sum(_em(letter) for letter in words)


def fitting(words: str, size: float, width: float) -> float:
    """``size``, or a smaller one at which bold ``words`` are no wider than ``width`` pixels."""
    return min(size, size * width / text_width(words, size, bold=True))


def wrapped(words: str, size: float, width: float) -> list[str]:
    """``words`` in lines that are no wider than ``width`` pixels."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _em(letter: str) -> float:
    if letter in " ,.:·il|'()-":
        return _NARROW
    return _DIGIT if letter.isdigit() else _CAPITAL if letter.isupper() or letter in "–…×→=mw%" else _LOWER


def oklch(lightness: float, chroma: float, hue: float) -> str:
    """A colour by its looks (Ottosson 2020): lightness and chroma from 0 to 1, hue in degrees; as ``#rrggbb``."""
    a, b = chroma * cos(hue * pi / 180), chroma * sin(hue * pi / 180)
    long, medium, short = (
        (lightness + i * a + j * b) ** 3
        for i, j in ((0.3963377774, 0.2158037573), (-0.1055613458, -0.0638541728), (-0.0894841775, -1.2914855480))
    )
    channels = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(max(one, 0.0), 1.0))):02x}" for one in channels)


def _gamma(linear: float) -> float:
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
