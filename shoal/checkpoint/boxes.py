"""Arithmetic of boxes: what two share, what one leaves of another, and which parts cover a third."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TypeVar

from shoal.placement import Box

T = TypeVar("T")


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a tensor that fills ``box``."""
    return tuple(stop - start for start, stop in box)


def intersect(one: Box, other: Box) -> Box | None:
    """The box that two of the same dims share; None when it has no element."""
    spans = zip(one, other, strict=True)
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in spans)
    return shared if all(start < stop for start, stop in shared) else None


def subtract(box: Box, cut: Box) -> list[Box]:
    """What remains of ``box`` without ``cut``, which lies inside it: disjoint boxes, at most two a dim."""
    rest: list[Box] = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, cut, strict=True)):
        before, after = cut[:dim], box[dim + 1 :]
        rest += [(*before, span, *after) for span in ((start, low), (high, stop)) if span[0] < span[1]]
    return rest


def cover(target: Box, parts: Iterable[tuple[Box, T]]) -> tuple[list[tuple[Box, T]], list[Box]]:
    """Disjoint boxes of ``target``, each with the first of the ``parts`` that holds it, and the boxes none holds."""
    found: list[tuple[Box, T]] = []
    open_boxes = [target] if prod(extents(target)) else []
    for box, part in parts:
        if not open_boxes:
            break
        rest: list[Box] = []
        for wanted in open_boxes:
            if (shared := intersect(wanted, box)) is None:
                rest.append(wanted)
            else:
                found.append((shared, part))
                rest += subtract(wanted, shared)
        open_boxes = rest
    return found, open_boxes


def within(box: Box, origin: Box) -> tuple[slice, ...]:
    """Where ``box`` lies in a tensor that fills ``origin``."""
    spans = zip(box, origin, strict=True)
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in spans)


def text(box: Box) -> str:
    """The box as a subscript, such as ``[0:4,8:16]``."""
    return f"[{','.join(f'{start}:{stop}' for start, stop in box)}]"
