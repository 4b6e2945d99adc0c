"""What joins the ranks of one machine: bytes through memory that they share, word of them through pipes.

A rank that has something for others copies it to its arena, a chunk at a time, and writes to the pipe of each where it
is; a reader copies it out, or adds it to what it has, and says so when it next has something to say. Nobody copies
while it has other things to do, and there are no threads: what has arrived is taken in whenever its rank starts
something or waits, for whatever it waits. So ranks may start and wait for things of different groups in any order. A
pipe also tells when the process at its other end has gone, and that the system has made everything visible that was
written before.

What nobody has asked for yet stays in the sender's arena. When a sender has no room left it says so, and its readers
move such things out of the way until it has; whoever waits makes room, so two ranks never wait for each other's.
"""

from __future__ import annotations

import os
import select
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch.distributed as dist

from shoal.comm.backends.arena import Arena
from shoal.comm.backends.meeting import Link, meet
from shoal.comm.backends.parcel import Loan, Parcel
from shoal.comm.backends.regions import Regions

CHUNK = 1 << 18
"""Bytes that are copied, and told of, at a time."""
INLINE = 4096
"""So few bytes go through the pipe themselves."""

_HEADER = struct.Struct("=BQqqqq")  # what it is, group, number, place, length, length of the whole
_CHUNK, _INLINE, _READ, _FULL, _ROOM, _LENT, _RETURNED, _ENDED = range(8)
LENT, LENT_MAPPED = 1 << 20, 1 << 18
"""From so many bytes on, what may not be written to for a while anyway is read where it is; if others have it mapped,
from so many."""
_AT_ONCE = 1 << 16
_LAG = 4 << 20
"""Bytes that a rank may have read without saying so: it says it with the next message, which costs no time of its own
and wakes nobody who has other things to wait for."""
_BLOCKED_S = 0.001
"""Between two tries to write to a pipe that is full."""
_PATIENCE_S = 5.0
"""With readers of full pipes, at the end."""

Address = tuple[int, int]
"""A group, and a number that its ranks agree on."""


class Receiver(Protocol):
    """Who has asked for something."""

    def take(self, parcel: Parcel | Loan) -> bool:
        """The next chunk has come from ``parcel.source``; returns whether it was the last from there. Raises
        RuntimeError where something else was asked for."""


class Posted:
    """What is on its way from this rank to ``to``: how much of ``data`` has been copied, and in how many pipes there
    was no room for word of it. What is ``lent`` is not copied: ``to`` are those that have yet to read it."""

    def __init__(self, to: Sequence[int], address: Address, data: np.ndarray, *, lent: bool = False) -> None:
        self.to, self.address, self.data, self.lent = list(to), address, data, lent
        self.at, self.untold, self.copied = 0, 0, False

    @property
    def left(self) -> bool:
        """Whether it arrives whatever this rank does next."""
        return self.copied and not self.untold and not (self.lent and self.to)


class Links:
    """Joins this ``rank`` to the others of ``ranks``, which all call :meth:`join` at once."""

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        arena: Arena,
        links: dict[int, Link],
        regions: Regions,
        timeout_s: float,
    ) -> None:
        self.rank, self.ranks, self.timeout_s = rank, ranks, timeout_s
        self._arena, self._links = arena, links
        self._poll = select.epoll()
        self._source_of = {link.source: rank for rank, link in links.items()}
        for descriptor in self._source_of:
            self._poll.register(descriptor, select.EPOLLIN)
        self._gone: set[int] = set()
        self._rest: dict[int, bytes] = defaultdict(bytes)
        """By rank: the part of a message that has been read of its pipe."""
        self._unwritten: dict[int, deque[tuple[bytes, Posted | None]]] = {one: deque() for one in links}
        """By rank: messages for which there was no room in its pipe, and whose they are."""
        self._unsent: list[Posted] = []
        self._wanted: dict[tuple[int, Address], deque[Receiver]] = defaultdict(deque)
        self._arrived: dict[tuple[int, Address], deque[Parcel | Loan]] = defaultdict(deque)
        self._held: dict[int, dict[int, Parcel]] = {one: {} for one in links}
        """By rank and place: what has not been read in its arena."""
        self._owed: dict[int, list[int]] = {one: [] for one in links}
        """By rank: places in its arena that have been read, which it does not know yet; and their bytes."""
        self._owed_bytes = dict.fromkeys(links, 0)
        self._lends = all(link.memory for link in links.values())
        self._lent: dict[tuple[int, Address], Posted] = {}
        """By reader."""
        self._regions = regions
        self._full: set[int] = set()
        """Ranks that have run out of room."""
        self._said_full = False
        self._beside: tuple[ThreadPoolExecutor, int] | None = None
        _ALL.add(self)

    @classmethod
    def join(cls, rank: int, ranks: Sequence[int], store: dist.Store, timeout_s: float) -> Links | None:
        """None for all of them, where the system does not have what it takes for one (:mod:`.meeting`)."""
        regions = Regions()
        met = meet(rank, ranks, store, CHUNK, regions)
        return None if met is None else cls(rank, ranks, *met, regions, timeout_s)

    def reaches(self, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` are among those that are joined."""
        return set(ranks) <= set(self.ranks)

    # ---- what goes out

    def lends(self, nbytes: int) -> bool:
        """Whether so many bytes are read where they are, whatever memory they are in."""
        return self._lends and nbytes >= LENT

    def allocate(self, nbytes: int) -> np.ndarray | None:
        """Zeros from which others read fastest what is lent; None where ordinary memory is as good."""
        with suppress(OSError):
            return self._regions.allocate(nbytes) if self._lends else None
        return None

    def post(self, to: Sequence[int], address: Address, data: np.ndarray, *, lend: bool = False) -> Posted:
        """Begin to send bytes to some ranks; they may be written to when it has :attr:`Posted.left`. With ``lend`` that
        may be when they have been read: for what its readers come to soon."""
        mapped = lend and self._lends and len(data) >= LENT_MAPPED and self._region(data) is not None
        posted = Posted(to, address, data, lent=mapped or (lend and self.lends(len(data))))
        self._unsent.append(posted)
        self._send()
        return posted

    def _send(self) -> None:
        """As much as there is room for. What goes to one rank keeps its order."""
        if not self._unsent:
            return
        stuck: set[int] = set()
        for posted in self._unsent:
            if not stuck.isdisjoint(posted.to) or not self._copy(posted):
                stuck.update(posted.to)
        self._unsent = [posted for posted in self._unsent if not posted.copied]
        if self._said_full and not self._unsent:
            self._say_to_all(_ROOM)
            self._said_full = False

    def _copy(self, posted: Posted) -> bool:
        """To where its readers can read it; returns whether there was room for all of it."""
        total = len(posted.data)
        while not posted.copied:
            if any(self._unwritten[rank] for rank in posted.to):
                return False
            chunk = posted.data if posted.lent else posted.data[posted.at : posted.at + CHUNK]
            if posted.lent:
                self._say_what_ended()
                self._lent.update({(rank, posted.address): posted for rank in posted.to})
                region, at = self._region(chunk) or (-1, chunk.ctypes.data)
                message = _HEADER.pack(_LENT, *posted.address, at, region, total)
            elif len(chunk) <= INLINE:
                message = _HEADER.pack(_INLINE, *posted.address, 0, len(chunk), total) + chunk.tobytes()
            else:
                place = self._arena.place(chunk, len(posted.to))
                if place is None:
                    if not self._said_full:
                        self._said_full = True
                        self._say_to_all(_FULL)
                    return False
                message = _HEADER.pack(_CHUNK, *posted.address, place, len(chunk), total)
            posted.at += len(chunk)
            posted.copied = posted.at == total
            for rank in posted.to:
                self._write(rank, message, posted)
        return True

    def _region(self, data: np.ndarray) -> tuple[int, int] | None:
        return self._regions.find(data.ctypes.data, len(data))

    def _say_what_ended(self) -> None:
        """Before another region has the descriptor."""
        for region in self._regions.ended():
            self._say_to_all(_ENDED, region)

    def _say_to_all(self, what: int, of: int = 0) -> None:
        for rank in self._links:
            self._write(rank, _HEADER.pack(what, 0, 0, of, 0, 0))

    def _write(self, rank: int, message: bytes = b"", posted: Posted | None = None) -> None:
        """With what this rank owes the other to know."""
        if owed := self._owed[rank]:
            message = b"".join(_HEADER.pack(_READ, 0, 0, place, 0, 0) for place in owed) + message
            owed.clear()
            self._owed_bytes[rank] = 0
        if posted is not None:
            posted.untold += 1
        self._unwritten[rank].append((message, posted))
        self._flush(rank)

    def _flush(self, rank: int) -> None:
        waiting = self._unwritten[rank]
        while waiting:
            message, posted = waiting[0]
            try:
                written = os.write(self._links[rank].to, message)
            except BlockingIOError:
                return
            except BrokenPipeError:
                written = len(message)  # nobody there reads any more; who needs an answer will see that none comes
            if written < len(message):
                waiting[0] = message[written:], posted
                continue
            waiting.popleft()
            if posted is not None:
                posted.untold -= 1

    # ---- what comes in

    def expect(self, source: int, address: Address, receiver: Receiver) -> None:
        """``receiver`` takes what comes from ``source`` under an address, after those that have asked before."""
        key = source, address
        if key not in self._wanted:
            arrived = self._arrived.pop(key, None)
            while arrived:
                if receiver.take(arrived.popleft()):
                    if arrived:
                        self._arrived[key] = arrived
                    return
        self._wanted[key].append(receiver)

    def until(self, done: Callable[[], bool], missing: Callable[[], Collection[int]]) -> None:
        """Take in what arrives until ``done()``, for which something of the ranks ``missing()`` is needed. Raises
        RuntimeError when one of them has gone, or nothing at all has come for as long as the time-out."""
        deadline = time.monotonic() + self.timeout_s
        while not done():
            if gone := self._gone.intersection(missing()):
                raise RuntimeError(f"the connection to rank {min(gone)} was closed by peer")
            blocked = any(self._unwritten.values())
            left = max(deadline - time.monotonic(), 0.0)
            if self.look(_BLOCKED_S if blocked else left):
                deadline = time.monotonic() + self.timeout_s
            elif not left and (late := missing()):
                raise RuntimeError(f"Timed out: nothing from rank {min(late)} for {self.timeout_s:g} s")

    def look(self, wait_s: float = 0.0) -> bool:
        """Take in what has arrived, or arrives before ``wait_s`` seconds are over; returns whether anything has."""
        assert not self._poll.closed, "a message is waited for after its world was closed"
        ready = self._poll.poll(wait_s)
        for descriptor, _ in ready:
            if descriptor in self._source_of:
                self._read(self._source_of[descriptor])
        for rank, waiting in self._unwritten.items():
            if waiting:
                self._flush(rank)
        self._send()
        return bool(ready)

    def beside(self, wait: Callable[[], object]) -> None:
        """Take in what arrives while a thread is in ``wait``, for something that does not come over these links."""
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._poll.register(self._beside[1], select.EPOLLIN)
        thread, woken = self._beside
        waiting = thread.submit(wait)
        waiting.add_done_callback(lambda _: os.eventfd_write(woken, 1))
        self.until(waiting.done, tuple)
        os.eventfd_read(woken)
        waiting.result()

    def _read(self, source: int) -> None:
        found = os.read(self._links[source].source, _AT_ONCE)
        if not found:
            self._gone.add(source)
            self._poll.unregister(self._links[source].source)
            return
        found, at, came = self._rest[source] + found, 0, []
        while len(found) - at >= _HEADER.size:
            header = _HEADER.unpack_from(found, at)
            inline = header[4] if header[0] == _INLINE else 0
            start = at + _HEADER.size
            if len(found) - start < inline:
                break
            at = start + inline
            came.append((header, found[start:at]))
        self._rest[source] = found[at:]
        for header, data in came:
            self._heed(source, header, data)

    def _heed(self, source: int, header: tuple[int, ...], data: bytes) -> None:
        what, group, number, place, length, total = header
        if what == _CHUNK:
            self._deliver((source, (group, number)), self._parcel(source, place, length, total))
        elif what == _INLINE:
            parcel = Parcel(source, np.frombuffer(bytearray(data), dtype=np.uint8), total, None)
            self._deliver((source, (group, number)), parcel)
        elif what == _LENT:
            self._deliver((source, (group, number)), self._loan(source, (group, number), (length, place, total)))
        elif what == _RETURNED:
            self._lent.pop((source, (group, number))).to.remove(source)
        elif what == _READ:
            self._arena.read(place)
        elif what == _ENDED:
            if (memory := self._links[source].memory) is not None:
                memory.forget(place)
        elif what == _FULL:
            self._full.add(source)
            for parcel in [*self._held[source].values()]:
                parcel.copy_out()
            self._write(source)
        else:
            self._full.discard(source)

    def _parcel(self, source: int, place: int, length: int, total: int) -> Parcel:
        held = self._held[source]

        def release() -> None:
            del held[place]
            self._owed[source].append(place)
            self._owed_bytes[source] += length
            if source in self._full or self._owed_bytes[source] > _LAG:
                self._write(source)

        held[place] = parcel = Parcel(source, self._links[source].arena[place : place + length], total, release)
        return parcel

    def _loan(self, source: int, address: Address, where: tuple[int, int, int]) -> Loan:
        memory = self._links[source].memory
        assert memory is not None, "lent to a rank that cannot read it"
        returned = _HEADER.pack(_RETURNED, *address, 0, 0, 0)
        return Loan(source, memory.lent(*where), lambda: self._write(source, returned))

    def _deliver(self, key: tuple[int, Address], parcel: Parcel | Loan) -> None:
        if waiting := self._wanted.get(key):
            if waiting[0].take(parcel):
                waiting.popleft()
                if not waiting:
                    del self._wanted[key]
        else:
            self._arrived[key].append(parcel)
        if parcel.source in self._full:
            parcel.copy_out()  # also where it waits for what others send

    # ---- the end

    def close(self) -> None:
        """Nobody waits for anything any more. What has left this rank arrives all the same."""
        deadline = time.monotonic() + _PATIENCE_S
        while any(self._unwritten.values()) and time.monotonic() < deadline:
            time.sleep(_BLOCKED_S)
            for rank in self._links:
                self._flush(rank)
        if self._beside is not None:
            self._beside[0].shutdown(wait=False)
        self._let_go()
        self._arena.forget()
        for kept in (self._links, self._unwritten, self._wanted, self._arrived, self._held, self._lent):
            kept.clear()
        self._unsent.clear()

    def _let_go(self) -> None:
        """Close what is open."""
        if not self._poll.closed:
            self._poll.close()
            os.close(self._arena.descriptor)
            for link in self._links.values():
                os.close(link.source)
                os.close(link.to)
            if self._beside is not None:
                os.close(self._beside[1])


_ALL: weakref.WeakSet[Links] = weakref.WeakSet()
"""A process that is forked must not keep pipes open: that this one has gone would not be seen."""


def _let_go_in_child() -> None:
    for links in _ALL:
        links._let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
