"""The colours of what memory is for: parameters, gradients and optimizer states as the figures of ZeRO have them (blue,
orange, green), the rest beside them."""

from __future__ import annotations

from shoal.purposes import ACTIVATIONS, COMMUNICATION, GRADIENTS, HOST, LOGITS, PARAMETERS, STATES
from shoal.report.lanes import Skin
from shoal.report.memory_words import HOST_PARTS, OTHER
from shoal.report.pipeline_colours import contrast
from shoal.report.svg import oklch

_LOOKS = {
    PARAMETERS: (0.00, 0.13, 255.0),
    GRADIENTS: (0.10, 0.14, 55.0),
    STATES: (0.06, 0.12, 150.0),
    ACTIVATIONS: (0.00, 0.13, 305.0),
    LOGITS: (0.04, 0.16, 10.0),
    COMMUNICATION: (0.16, 0.13, 95.0),
}
"""By how much it is lighter than the theme, chroma and hue."""
_INKS = ("#ffffff", "#0d1117")


def css_name(part: str) -> str:
    """The class of a part."""
    return part.replace(" ", "-")


def host_name(part: str) -> str:
    """The class of a part on the host."""
    return f"{HOST}-{css_name(part)}"


def colour(part: str, lightness: float, grey: str) -> tuple[str, str]:
    """(fill, ink of what is written on it) on a paper whose colours are of this ``lightness``."""
    fill = grey
    if part in _LOOKS:
        lighter, chroma, hue = _LOOKS[part]
        fill = oklch(lightness + lighter, chroma, hue)
    return fill, max(_INKS, key=lambda ink: contrast(ink, fill))


def rules(skin: Skin) -> str:
    """The style of all parts, and of what is on the host: pale, in dashes."""
    found = [f".line{{stroke:{skin.line};fill:none}}"]
    for part in (*_LOOKS, OTHER):
        fill, ink = colour(part, skin.theme.only, skin.rest)
        found.append(f".{css_name(part)} rect{{fill:{fill}}} .{css_name(part)} text{{fill:{ink}}}")
    for part in HOST_PARTS:
        fill, _ = colour(part, skin.theme.only, skin.rest)
        found.append(f".{host_name(part)} rect{{fill:{fill};fill-opacity:.22;stroke:{fill};stroke-dasharray:3 2}}")
        found.append(f".{host_name(part)} text{{fill:{skin.ink}}}")
    found.append(f".{HOST} rect{{fill:{skin.paper};stroke:{skin.muted};stroke-dasharray:3 2}}")
    return "\n".join(found)
