"""Collectives in memory that the processes of one machine share (:mod:`shoal.comm.backends.links`).

Every rank shows the others its part or its term, and takes theirs in as they come, chunk by chunk. A sum over more than
two ranks is made once: each rank adds up its share of it, which then is gathered (Rabenseifner 2004).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from shoal.comm.backends import JOIN, Reduction, Work
from shoal.comm.backends.links import Address, Links, Posted
from shoal.comm.backends.parcel import Loan, Parcel, Piece
from shoal.meter import mark
from shoal.purposes import COMMUNICATION

_NOTHING = np.empty(0, dtype=np.uint8)
_SMALL = 128 << 10
"""Bytes of a sum that every rank makes for itself: one message less is worth more than the work."""


def _nothing() -> None:
    pass


class SharedGroup:
    """Some of the ranks that ``links`` join. ``channel`` tells groups of the same ranks apart."""

    def __init__(self, links: Links, ranks: Sequence[int], channel: str) -> None:
        self.links, self._ranks = links, ranks
        self._others = [rank for rank in ranks if rank != links.rank]
        self.rank, self.size = ranks.index(links.rank), len(ranks)
        name = f"{channel}/{'-'.join(map(str, ranks))}".encode()
        self._key = int.from_bytes(blake2b(name, digest_size=8).digest(), "big")
        self._number = 0

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Work:
        flat = tensor.view(-1)
        if self.links.lends(flat.nbytes // self.size) or (self.size > 2 and flat.nbytes > _SMALL):
            return _Halves(self, flat, reduction)
        address, others = self._next(), self._others
        posted = self.links.post(others, address, _bytes(flat))
        return _Sum(self.links, address, others, flat, flat, reduction, [posted], waits=True)

    def all_gather(self, parts: Sequence[Tensor], own: Tensor | None = None) -> Work:
        address = self._next()
        posted = self._post(self._others, address, parts[self.rank] if own is None else own)
        return self._receive(address, parts, [posted])

    def reduce_scatter(self, out: Tensor, parts: Sequence[Tensor]) -> Work:
        return self.scatter(out, parts, "sum", _nothing)

    def scatter(self, out: Tensor, parts: Sequence[Tensor], reduction: Reduction, then: Callable[[], None]) -> _Sum:
        """A reduce-scatter, by any reduction; ``then`` is called when ``out`` is there."""
        address = self._next()
        posted = [self._post([rank], address, parts[self._ranks.index(rank)]) for rank in self._others]
        return _Sum(self.links, address, self._others, out, parts[self.rank], reduction, posted, then=then)

    def exchange(self, into: Tensor, taken: Sequence[int], out: Tensor, given: Sequence[int]) -> Work:
        address = self._next()
        parts = out.split(list(given))
        posted = [self._post([rank], address, part) for rank, part in zip(self._ranks, parts, strict=True) if len(part)]
        return self._receive(address, into.split(list(taken)), posted, empty=False)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        address = self._next()
        if self.rank == source:
            return _Copy(self.links, address, {}, [self._post(self._others, address, tensor)])
        return _Copy(self.links, address, {self._ranks[source]: tensor}, [])

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction = "sum") -> Work:
        address, flat = self._next(), tensor.view(-1)
        if self.rank == root:
            return _Sum(self.links, address, self._others, flat, flat, reduction, [])
        return _Copy(self.links, address, {}, [self._post([self._ranks[root]], address, flat)])

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        self.links.look()
        address = self._key, -1 - tag
        return _Copy(self.links, address, {}, [self.links.post([self._ranks[to]], address, _bytes(tensor))])

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        return _Copy(self.links, (self._key, -1 - tag), {self._ranks[source]: tensor}, [])

    def barrier(self) -> Work:
        return self.all_gather([torch.empty(0)] * self.size)

    def gather(self, parts: Sequence[Tensor]) -> tuple[_Copy, Address]:
        """An all-gather of which this rank's part is not there yet: it is posted under the address when it is."""
        address = self._next()
        return self._receive(address, parts, []), address

    def post_to_all(self, address: Address, tensor: Tensor) -> Posted:
        return self._post(self._others, address, tensor)

    def _post(self, ranks: Sequence[int], address: Address, tensor: Tensor) -> Posted:
        """For those that take it in as soon as they come to this collective themselves."""
        return self.links.post(ranks, address, _bytes(tensor), lend=True)

    def _receive(
        self, address: Address, parts: Sequence[Tensor], posted: Sequence[Posted], *, empty: bool = True
    ) -> _Copy:
        """All parts but this rank's own; those without elements, too, if they come."""
        into = {rank: part for rank, part in zip(self._ranks, parts, strict=True) if empty or len(part)}
        into.pop(self.links.rank, None)
        return _Copy(self.links, address, into, posted)

    def _next(self) -> Address:
        """The next collective's. What has arrived meanwhile is taken in before it starts."""
        self.links.look()
        self._number += 1
        return self._key, self._number

    def close(self) -> None:
        pass


class _Copy:
    """Ends when what comes from each rank is in its tensor, and what goes out has left."""

    def __init__(self, links: Links, address: Address, into: Mapping[int, Tensor], posted: Sequence[Posted]) -> None:
        self._links, self._posted = links, posted
        self._into = {rank: _bytes(tensor) for rank, tensor in into.items()}
        self._at = dict.fromkeys(into, 0)
        for rank in into:
            links.expect(rank, address, self)

    def take(self, parcel: Parcel | Loan) -> bool:
        source = parcel.source
        into, start = self._into[source], self._at[source]
        _check(parcel, len(into))
        stop = self._at[source] = start + parcel.length
        parcel.copy_to(into[start:stop])
        if stop < len(into):
            return False
        del self._into[source]
        return True

    def done(self) -> bool:
        return not self._into and all(one.left for one in self._posted)

    def missing(self) -> Collection[int]:
        return self._into or _readers(self._posted)

    def wait(self) -> None:
        self._links.until(self.done, self.missing)


class _Sum:
    """Ends when the terms of all ``sources``, and this rank's ``own``, have been joined in ``out``, which may be that.

    Terms are joined in the order of ranks; in half precision three or more are added up in float32, and rounded once.
    Where ``out`` is posted, each chunk waits until it has been copied.
    """

    def __init__(
        self,
        links: Links,
        address: Address,
        sources: Sequence[int],
        out: Tensor,
        own: Tensor,
        reduction: Reduction,
        posted: Sequence[Posted],
        *,
        waits: bool = False,
        then: Callable[[], None] = _nothing,
    ) -> None:
        self._links, self._posted, self._waits, self._then = links, posted, waits, then
        self._out, self._own, self._join = out, own, JOIN[reduction]
        self._exact = torch.promote_types(out.dtype, torch.float32) if out.is_floating_point() else out.dtype
        self._at, self._ended = 0, False
        self._left = dict.fromkeys(sources, out.nbytes)
        """By rank that has not sent all: the bytes to come."""
        self._held: dict[int, deque[Piece]] = {rank: deque() for rank in sources}
        for rank in sources:
            links.expect(rank, address, self)

    def take(self, parcel: Parcel | Loan) -> bool:
        source = parcel.source
        _check(parcel, self._out.nbytes)
        self._held[source].extend(parcel.pieces())
        self._left[source] -= parcel.length
        if last := not self._left[source]:
            del self._left[source]
        self._advance()
        return last

    def _advance(self) -> None:
        """Join the chunks that are there from everyone."""
        while not self._ended and all(self._held.values()):
            stop = self._at + next(iter(self._held.values()))[0].length
            if self._waits and any(posted.at < stop for posted in self._posted):
                return
            parcels = {rank: held.popleft() for rank, held in self._held.items()}
            first, last = (place // self._out.itemsize for place in (self._at, stop))
            self._add_up(parcels, first, last)
            for parcel in parcels.values():
                parcel.release()
            self._at = stop
            if self._at == self._out.nbytes:
                self._ended = True
                then, self._then = self._then, _nothing  # which may refer to this
                then()

    def _add_up(self, parcels: Mapping[int, Piece], first: int, last: int) -> None:
        own, out = self._own[first:last], self._out[first:last]
        received = {rank: torch.from_numpy(parcel.data) for rank, parcel in parcels.items()}
        mark(COMMUNICATION, *received.values())
        terms = {rank: term.view(out.dtype) for rank, term in received.items()}
        one, other, *rest = (term for _, term in sorted({**terms, self._links.rank: own}.items(), key=itemgetter(0)))
        # `out` may be this rank's own term, and is not to be written to before that has been added.
        in_place = not rest or (self._exact == out.dtype and (one is own or other is own))
        total = out if in_place else torch.empty_like(out, dtype=self._exact)
        self._join(one if in_place else one.to(self._exact), other, out=total)
        for term in rest:
            self._join(total, term, out=total)
        if not in_place:
            out.copy_(total)

    def done(self) -> bool:
        self._advance()
        return self._ended and all(one.left for one in self._posted)

    def missing(self) -> Collection[int]:
        return self._left or _readers(self._posted)

    def wait(self) -> None:
        self._links.until(self.done, self.missing)


class _Halves:
    """An all-reduce: each rank's share of the sum, then all shares."""

    def __init__(self, group: SharedGroup, flat: Tensor, reduction: Reduction) -> None:
        parts = flat.tensor_split(group.size)
        self._links = group.links
        self._shared: Posted | None = None
        self._gather, address = group.gather(parts)
        own = parts[group.rank]

        def share() -> None:
            self._shared = group.post_to_all(address, own)

        self._scatter = group.scatter(own, parts, reduction, share)

    def _done(self) -> bool:
        return self._scatter.done() and self._gather.done() and self._shared is not None and self._shared.left

    def _missing(self) -> Collection[int]:
        if not self._scatter.done():
            return self._scatter.missing()
        assert self._shared is not None
        return self._gather.missing() or _readers([self._shared])

    def wait(self) -> None:
        self._links.until(self._done, self._missing)


def _check(parcel: Parcel | Loan, expected: int) -> None:
    if parcel.total != expected:
        raise RuntimeError(f"rank {parcel.source} sends {parcel.total} bytes where {expected} are expected")


class _Memory:
    """A tensor's memory as NumPy takes it. (``Tensor.numpy`` would have the storage keep its size for ever.)"""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _bytes(tensor: Tensor) -> np.ndarray:
    """Of a contiguous tensor."""
    return np.asarray(_Memory(tensor)) if tensor.numel() else _NOTHING


def _readers(posted: Sequence[Posted]) -> Collection[int]:
    """Of what has not left."""
    return {rank for one in posted if not one.left for rank in one.to}
