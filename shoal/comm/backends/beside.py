"""A backend that shares its rank with :class:`~shoal.comm.backends.links.Links`: several machines of several ranks.

A rank that waits in another backend would take nothing in of what its neighbours send, and they might wait for it to
pass on what the rank that it waits for is waiting for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.comm.backends import Backend, Reduction, Work

Wait = Callable[[], object]


class Beside:
    """``backend``, each of whose waits is a call of ``beside``, which waits while it does other things."""

    def __init__(self, backend: Backend, beside: Callable[[Wait], None]) -> None:
        self._backend, self._beside = backend, beside

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Work:
        return _Waited(self._backend.all_reduce(tensor, reduction), self._beside)

    def all_gather(self, parts: Sequence[Tensor]) -> Work:
        return _Waited(self._backend.all_gather(parts), self._beside)

    def reduce_scatter(self, out: Tensor, parts: Sequence[Tensor]) -> Work:
        return _Waited(self._backend.reduce_scatter(out, parts), self._beside)

    def exchange(self, into: Tensor, taken: Sequence[int], out: Tensor, given: Sequence[int]) -> Work:
        return _Waited(self._backend.exchange(into, taken, out, given), self._beside)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return _Waited(self._backend.broadcast(tensor, source), self._beside)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction = "sum") -> Work:
        return _Waited(self._backend.reduce(tensor, root, reduction), self._beside)

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        return _Waited(self._backend.send(tensor, to, tag), self._beside)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        return _Waited(self._backend.receive(tensor, source, tag), self._beside)

    def barrier(self) -> Work:
        return _Waited(self._backend.barrier(), self._beside)

    def close(self) -> None:
        self._backend.close()


class _Waited:
    def __init__(self, work: Work, beside: Callable[[Wait], None]) -> None:
        self._work: Work | None = work
        self._beside = beside

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self._beside(work.wait)
