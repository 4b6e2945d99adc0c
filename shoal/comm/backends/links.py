"""What joins the ranks of one machine: bytes through memory that they share, word of them through pipes.

A rank that has something for others copies it to its arena, a chunk at a time, and writes to the pipe of each where it
is; a reader copies it out, or adds it to what it has, and says so. Nobody copies while it has other things to do: what
has arrived is taken in whenever its rank waits for something, whatever that is. So no rank need start or wait for
things in the order in which another does, and there are no threads. A pipe also tells when the process at its other
end has gone, and that the system has made everything visible that was written before.

What nobody has asked for yet stays in the sender's arena. When a sender has no room left it says so, and from then on
its readers move such things out of the way; whoever waits makes room, so two ranks never wait for each other's.
"""

from __future__ import annotations

import os
import select
import shutil
import struct
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch.distributed as dist

from shoal.comm.backends.arena import ALIGNMENT, Arena, mapped

FOLDER = Path("/dev/shm")
CHUNK = 1 << 20
"""Bytes. A reader copies one while the writer copies the next, and both from and to their caches."""
INLINE = 1024
"""So few bytes go through the pipe themselves."""
LARGEST, SMALLEST = 1 << 30, 4 * CHUNK
"""Bytes of an arena: of that which is there for all ranks of the machine, each takes its share of a half."""

_HEADER = struct.Struct("=BQqqq")  # what it is, group, number, place, length
_CHUNK, _INLINE, _READ, _FULL = range(4)
_AT_ONCE = 1 << 16
_BLOCKED_S = 0.001
"""Between two tries to write to a pipe that is full."""
_PATIENCE_S = 5.0
"""With readers of full pipes, at the end."""

Address = tuple[int, int]
"""A group, and a number that its ranks agree on."""


class Parcel:
    """Bytes that have come from rank ``source``, whole or a chunk of what is coming."""

    def __init__(self, source: int, data: np.ndarray, release: Callable[[], None]) -> None:
        self.source, self.data, self._release = source, data, release

    def release(self) -> None:
        """They have been read."""
        self._release()

    def secure(self) -> None:
        """Move them out of their sender's way."""
        self.data = self.data.copy()
        self._release()
        self._release = _nothing


class Receiver(Protocol):
    """Who has asked for something."""

    def take(self, parcel: Parcel) -> bool:
        """The next chunk has come from ``parcel.source``; returns whether it was the last from there."""


class Posted:
    """What is on its way from this rank to ``to``: how much of ``data`` has left."""

    def __init__(self, to: Sequence[int], address: Address, data: np.ndarray) -> None:
        self.to, self.address, self.data = to, address, data
        self.at, self.left = 0, False


class _Link(NamedTuple):
    """To another rank: its arena, the pipe from it and the one to it."""

    arena: np.ndarray
    source: int
    to: int


class Links:
    """Joins this ``rank`` to the others of ``ranks``, which all call :meth:`join` at once."""

    def __init__(
        self, rank: int, ranks: Sequence[int], arena: Arena, links: dict[int, _Link], timeout_s: float
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._arena, self._links, self.timeout_s = arena, links, timeout_s
        self._poll = select.epoll()
        self._source_of = {link.source: rank for rank, link in links.items()}
        for descriptor in self._source_of:
            self._poll.register(descriptor, select.EPOLLIN)
        self._gone: set[int] = set()
        self._rest: dict[int, bytes] = defaultdict(bytes)
        """By rank: the part of a message that has been read of its pipe."""
        self._unwritten: dict[int, deque[bytes]] = defaultdict(deque)
        """By rank: messages for which there was no room in its pipe."""
        self._unsent: deque[Posted] = deque()
        self._wanted: dict[tuple[int, Address], deque[Receiver]] = defaultdict(deque)
        self._arrived: dict[tuple[int, Address], deque[Parcel]] = defaultdict(deque)
        self._held: dict[int, dict[int, Parcel]] = defaultdict(dict)
        """By rank and place: what has not been read in its arena."""
        self._full: set[int] = set()
        """Ranks that have run out of room."""
        self._said_full = False

    @classmethod
    def join(cls, rank: int, ranks: Sequence[int], store: dist.Store, timeout_s: float) -> Links | None:
        """None for all of them, where the system does not have what it takes for one. Leaves nothing behind in the file
        system, however a process ends from then on: what is open needs no name."""
        made = _Made()
        try:
            try:
                arena, folder = _offer(made, rank, ranks), str(made.folder)
            except OSError:
                arena, folder = None, ""
            store.set(f"arena/{rank}", folder)
            folders = {one: Path(name) for one in ranks if (name := store.get(f"arena/{one}").decode())}
            try:
                links = _accept(made, rank, folders) if len(folders) == len(ranks) else None
            except OSError:
                links = None
            if links is None:
                store.add("arenas/failed", 1)
            if store.add("arenas/opened", 1) == len(ranks):
                store.set("arenas/all", "")
            store.wait(["arenas/all"])
            if arena is None or links is None or store.add("arenas/failed", 0):
                made.close()
                return None
            return cls(rank, ranks, arena, links, timeout_s)
        finally:
            made.hide()

    def join_all(self, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` are among those that are joined."""
        return set(ranks) <= set(self.ranks)

    # ---- what goes out

    def post(self, to: Sequence[int], address: Address, data: np.ndarray) -> Posted:
        """Begin to send bytes to some ranks; they may be written to when :attr:`Posted.left`."""
        posted = Posted(to, address, data)
        self._unsent.append(posted)
        self._send()
        return posted

    def _send(self) -> None:
        """As much as there is room for, in order."""
        while self._unsent:
            posted = self._unsent[0]
            chunk = posted.data[posted.at : posted.at + CHUNK]
            if len(chunk) <= INLINE:
                message = _HEADER.pack(_INLINE, *posted.address, 0, len(chunk)) + chunk.tobytes()
            else:
                place = self._arena.place(chunk, len(posted.to))
                if place is None:
                    self._say_full()
                    return
                message = _HEADER.pack(_CHUNK, *posted.address, place, len(chunk))
            for rank in posted.to:
                self._write(rank, message)
            posted.at += len(chunk)
            if posted.at == len(posted.data):
                self._unsent.popleft().left = True

    def _say_full(self) -> None:
        if not self._said_full:
            self._said_full = True
            for rank in self._links:
                self._write(rank, _HEADER.pack(_FULL, 0, 0, 0, 0))

    def _write(self, rank: int, message: bytes) -> None:
        self._unwritten[rank].append(message)
        self._flush(rank)

    def _flush(self, rank: int) -> None:
        waiting = self._unwritten[rank]
        while waiting:
            try:
                os.write(self._links[rank].to, waiting[0])
            except BlockingIOError:
                return
            except BrokenPipeError:
                waiting.clear()  # nobody there reads any more; who needs an answer will see that none comes
                return
            waiting.popleft()

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
        RuntimeError when one of them has gone, or nothing has come of it for as long as the time-out."""
        deadline = time.monotonic() + self.timeout_s
        while not done():
            if gone := self._gone.intersection(missing()):
                raise RuntimeError(f"the connection to rank {min(gone)} was closed by peer")
            blocked = any(self._unwritten.values())
            left = deadline - time.monotonic()
            if left < 0:
                raise RuntimeError(f"Timed out: nothing from rank {min(missing())} for {self.timeout_s:g} s")
            for descriptor, _ in self._poll.poll(_BLOCKED_S if blocked else left):
                self._read(self._source_of[descriptor])
                deadline = time.monotonic() + self.timeout_s
            if blocked:
                for rank in self._links:
                    self._flush(rank)
            self._send()

    def _read(self, source: int) -> None:
        found = os.read(self._links[source].source, _AT_ONCE)
        if not found:
            self._gone.add(source)
            self._poll.unregister(self._links[source].source)
            return
        found, at = self._rest[source] + found, 0
        while len(found) - at >= _HEADER.size:
            what, group, number, place, length = _HEADER.unpack_from(found, at)
            inline = length if what == _INLINE else 0
            if len(found) - at < _HEADER.size + inline:
                break
            at += _HEADER.size
            if what == _READ:
                self._arena.read(place)
            elif what == _FULL:
                self._full.add(source)
                for parcel in [*self._held[source].values()]:
                    parcel.secure()
            elif what == _INLINE:
                data = np.frombuffer(bytearray(found[at : at + inline]), dtype=np.uint8)
                self._deliver((source, (group, number)), Parcel(source, data, _nothing))
                at += inline
            else:
                self._deliver((source, (group, number)), self._parcel(source, place, length))
        self._rest[source] = found[at:]

    def _parcel(self, source: int, place: int, length: int) -> Parcel:
        held = self._held[source]

        def release() -> None:
            del held[place]
            self._write(source, _HEADER.pack(_READ, 0, 0, place, 0))

        held[place] = parcel = Parcel(source, self._links[source].arena[place : place + length], release)
        return parcel

    def _deliver(self, key: tuple[int, Address], parcel: Parcel) -> None:
        waiting = self._wanted.get(key)
        if not waiting:
            if parcel.source in self._full:
                parcel.secure()
            self._arrived[key].append(parcel)
        elif waiting[0].take(parcel):
            waiting.popleft()
            if not waiting:
                del self._wanted[key]

    def close(self) -> None:
        """Nobody waits for anything any more. What has left this rank arrives all the same."""
        deadline = time.monotonic() + _PATIENCE_S
        while any(self._unwritten.values()) and time.monotonic() < deadline:
            time.sleep(_BLOCKED_S)
            for rank in self._links:
                self._flush(rank)
        self._poll.close()
        self._arena.close()
        for link in self._links.values():
            os.close(link.source)
            os.close(link.to)
        self._links.clear()


class _Made:
    """What is open, and the folder in which others find it, until they have."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.open: list[int] = []

    def hide(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, path: Path, flags: int) -> int:
        self.open.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
        return self.open[-1]

    def close(self) -> None:
        for descriptor in self.open:
            os.close(descriptor)


def _offer(made: _Made, rank: int, ranks: Sequence[int]) -> Arena:
    """A place for an arena and a pipe from each other rank, open."""
    made.folder = folder = Path(tempfile.mkdtemp(prefix="shoal-", dir=FOLDER))
    room = os.statvfs(folder)
    size = min(LARGEST, room.f_bavail * room.f_frsize // 2 // len(ranks)) // ALIGNMENT * ALIGNMENT
    if size < SMALLEST:
        raise OSError(f"{FOLDER} has {size} bytes for each rank")
    for other in ranks:
        if other != rank:
            os.mkfifo(folder / f"from-{other}", 0o600)
            made.add(folder / f"from-{other}", os.O_RDONLY | os.O_NONBLOCK)
    return Arena(made.add(folder / "arena", os.O_RDWR | os.O_CREAT | os.O_EXCL), size, CHUNK)


def _accept(made: _Made, rank: int, folders: dict[int, Path]) -> dict[int, _Link]:
    """Open what the others have made for this rank."""
    sources = iter(made.open)
    links = {}
    for other, folder in folders.items():
        if other != rank:
            source = next(sources)
            to = made.add(folder / f"from-{rank}", os.O_WRONLY | os.O_NONBLOCK)
            arena = os.open(folder / "arena", os.O_RDWR | os.O_CLOEXEC)
            links[other] = _Link(mapped(arena, os.fstat(arena).st_size), source, to)
            os.close(arena)
    return links


def _nothing() -> None:
    pass
