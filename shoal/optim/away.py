"""Updates of what is somewhere else between updates: pieces are brought in, updated and taken back one after another,
the next one on its way in and the last one on its way out meanwhile (three deep, as in ZeRO-Infinity, Rajbhandari et
al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from shoal.optim.runs import Run


class Arrival(Protocol):
    """A copy between device and host that is under way."""

    def wait(self) -> None:
        """Until it is done: the host may use what was copied, and reuse what it was copied from."""

    def join(self) -> None:
        """What the device computes from here on comes after it."""


class Kept(Protocol):
    """A flat tensor that lives in one place, and is used on the host now and then, or copied to the device.

    On the host it is used between :meth:`begin` (or :meth:`blank`) and :meth:`end`; until :meth:`settle`, memory there
    may be lent to it.
    """

    def begin(self) -> None:
        """Start to bring it to the host, if nobody has."""

    def here(self) -> Tensor:
        """It on the host, once it is there."""

    def blank(self) -> Tensor:
        """A place for it on the host, with any contents, all of which will be written to."""

    def end(self, *, changed: bool = True) -> None:
        """Start to take home what was written to it; if nothing was, it only goes."""

    def settle(self) -> None:
        """It is at home, and nothing on the host is lent to it."""

    def lift(self, into: Tensor) -> Arrival:
        """Start to copy it to a tensor of its size on the device."""

    def lower(self, source: Tensor, *, add: bool = False) -> None:
        """Start to take over (or to ``add``) the contents of a tensor of its size on the device."""

    def view(self) -> Tensor:
        """Its contents, to read and write between steps, wherever they are."""


class Shelf(Protocol):
    """Some parameters that are updated elsewhere than where they, their states or their gradients live."""

    def fetch(self) -> None:
        """Start to bring in what an update needs."""

    def runs(self) -> list[Run]:
        """All of it, once it is there; by one optimizer."""

    def leave(self) -> None:
        """Start to take back what has been updated, and show the model what it is to compute with."""

    def settle(self) -> None:
        """Everything is back."""


def in_turn(shelves: Sequence[Shelf], update: Callable[[list[Run]], None]) -> None:
    """Update each of ``shelves``."""
    for at, shelf in enumerate(shelves):
        if at == 0:
            shelf.fetch()
        if at + 1 < len(shelves):
            shelves[at + 1].fetch()
        update(shelf.runs())
        shelf.leave()
        if at > 0:
            shelves[at - 1].settle()
    if shelves:
        shelves[-1].settle()
