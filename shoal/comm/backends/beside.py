"""A backend that shares its rank with :class:`~shoal.comm.backends.links.Links`: several machines of several ranks.

A rank that waits in another backend would take nothing in of what its neighbours send, and they might wait for it to
pass on what the rank that it waits for is waiting for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from shoal.comm.backends import Backend, Work

Wait = Callable[[], object]
Arguments = ParamSpec("Arguments")


class Beside:
    """``backend``, each of whose waits is a call of ``beside``, which waits while it does other things."""

    def __init__(self, backend: Backend, beside: Callable[[Wait], None]) -> None:
        def waited(start: Callable[Arguments, Work]) -> Callable[Arguments, Work]:
            return lambda *these, **named: _Waited(start(*these, **named), beside)

        self.all_reduce = waited(backend.all_reduce)
        self.all_gather = waited(backend.all_gather)
        self.reduce_scatter = waited(backend.reduce_scatter)
        self.exchange = waited(backend.exchange)
        self.broadcast = waited(backend.broadcast)
        self.reduce = waited(backend.reduce)
        self.send = waited(backend.send)
        self.receive = waited(backend.receive)
        self.barrier = waited(backend.barrier)
        self.close = backend.close


class _Waited:
    def __init__(self, work: Work, beside: Callable[[Wait], None]) -> None:
        self._work: Work | None = work
        self._beside = beside

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self._beside(work.wait)
