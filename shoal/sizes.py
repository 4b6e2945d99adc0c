"""Bytes in words that people read: in the largest unit of which there are some."""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """In what bytes are told."""

    name: str
    size: int

    def of(self, nbytes: float) -> str:
        """How many of it, in three digits."""
        value = nbytes / self.size
        return f"{value:,.{0 if value >= 99.95 or self.size == 1 else 1 if value >= 9.995 else 2}f}"


_UNITS = tuple(Unit(name, 2**power) for name, power in (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)))


def unit_for(nbytes: float) -> Unit:
    """The unit in which ``nbytes`` are told, and what is to be compared with them."""
    return next((unit for unit in _UNITS if nbytes >= unit.size), _UNITS[-1])


def size_text(nbytes: float) -> str:
    """``1.50 GiB``, ``15.6 MiB``, ``12 B``."""
    unit = unit_for(nbytes)
    return f"{unit.of(nbytes)} {unit.name}"
