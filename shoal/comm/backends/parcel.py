"""What has come from another rank: bytes that lie in its arena or came with the message, or word of some that are still
where their owner has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np


class Parcel:
    """Bytes that have come from rank ``source``: all ``total`` of them, or a chunk."""

    def __init__(self, source: int, data: np.ndarray, total: int, release: Callable[[], None] | None) -> None:
        self.source, self.data, self.total, self._release = source, data, total, release

    @property
    def length(self) -> int:
        return len(self.data)

    def copy_to(self, into: np.ndarray) -> None:
        """Copy all of it, and be done with it."""
        into[:] = self.data
        self.release()

    def pieces(self) -> Iterator[Piece]:
        """In order, to look at one after another."""
        yield self

    def release(self) -> None:
        """They have been read."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def copy_out(self) -> None:
        """Move them out of their sender's way, unless they have been read."""
        if self._release is not None:
            self.data = self.data.copy()
            self.release()


class Lent(Protocol):
    """``length`` bytes in the memory of another process, of which ``at_once`` are looked at at a time."""

    length: int
    at_once: int

    def copy_to(self, into: np.ndarray) -> None: ...

    def look_at(self, start: int, stop: int) -> np.ndarray:
        """Some of them; valid until others are looked at."""


class Loan:
    """Bytes of rank ``source``, which keeps them as they are until ``give_back`` has been called."""

    def __init__(self, source: int, lent: Lent, give_back: Callable[[], None]) -> None:
        self.source, self._lent, self._give_back = source, lent, give_back
        self.length = self.total = lent.length

    def copy_to(self, into: np.ndarray) -> None:
        self._lent.copy_to(into)
        self._give_back()

    def pieces(self) -> Iterator[Piece]:
        for start in range(0, self.length, self._lent.at_once):
            stop = min(start + self._lent.at_once, self.length)
            yield _Part(self._lent, start, stop, self._give_back if stop == self.length else None)

    def copy_out(self) -> None:
        """They are in nobody's way."""


class _Part:
    """A piece of a loan."""

    def __init__(self, lent: Lent, start: int, stop: int, give_back: Callable[[], None] | None) -> None:
        self._lent, self._start, self._stop, self._give_back = lent, start, stop, give_back
        self.length = stop - start

    @property
    def data(self) -> np.ndarray:
        """Until the next piece from that rank is looked at."""
        return self._lent.look_at(self._start, self._stop)

    def release(self) -> None:
        if self._give_back is not None:
            self._give_back()


Piece = Parcel | _Part
