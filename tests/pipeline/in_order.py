"""A transport that moves messages as NCCL does, between threads that stand for ranks.

All messages between two ranks over one channel, of both directions, stand in one queue at each end. The first at one
end moves when the first at the other is its counterpart. Starting a message does not wait, but for the first of a
channel between two ranks: there each waits until the other has come to it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

from torch import Tensor

from shoal.comm.ledger import Ledger
from shoal.comm.world import Group


class Stuck(Exception):
    """Every rank waits for another."""


class Disorder(Exception):
    """A rank receives something else than what comes."""


@dataclass
class Message:
    """One end of a message, sent or to be received."""

    net: Network
    tensor: Tensor
    sent: bool
    tag: int
    moved: bool = False

    def wait(self) -> None:
        self.net.wait_until(lambda: self.moved)


class Network:
    """The queues of ``ranks`` ranks, each of which is a thread of :meth:`run`. Without ``channels`` all are one."""

    def __init__(self, ranks: int, *, channels: bool = True) -> None:
        self._ranks, self._channels = tuple(range(ranks)), channels
        self._queues: dict[tuple[str, int, int], deque[Message]] = defaultdict(deque)
        self._met: set[tuple[str, int, int]] = set()
        self._changed = Condition()
        self._running = self._waiting = 0
        self._stuck = False

    def group(self, rank: int, channel: str) -> Group:
        """All ranks, for one of them."""
        end = End(self, rank, channel if self._channels else "")
        return Group(self._ranks, "world", rank, Ledger(), {(self._ranks, channel): end}, channel)

    def left(self, rank: int) -> int:
        """How many messages a rank has started that have not moved."""
        with self._changed:
            return sum(len(queue) for (_, one, _), queue in self._queues.items() if one == rank)

    def start(self, rank: int, peer: int, channel: str, message: Message) -> Message:
        with self._changed:
            self._met.add((channel, rank, peer))
            self._progress()
            self.wait_until(lambda: (channel, peer, rank) in self._met)
            ours, theirs = self._queues[channel, rank, peer], self._queues[channel, peer, rank]
            ours.append(message)
            while ours and theirs and ours[0].sent != theirs[0].sent:
                self._move(ours.popleft(), theirs.popleft())
        return message

    def _move(self, one: Message, other: Message) -> None:
        source, target = (one, other) if one.sent else (other, one)
        if source.tag != target.tag:
            raise Disorder(f"tag {target.tag} comes where {source.tag} is sent")
        target.tensor.copy_(source.tensor)
        one.moved = other.moved = True
        self._progress()

    def _progress(self) -> None:
        self._waiting = 0  # all look again
        self._changed.notify_all()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            while not ready():
                self._waiting += 1
                if self._stuck or self._waiting == self._running:
                    self._stuck = True
                    self._changed.notify_all()
                    raise Stuck
                self._changed.wait()

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """``function(rank)`` on all ranks. Raises their first error."""
        results: list[Any] = [None] * len(self._ranks)
        errors: list[Exception] = []

        def work(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except Exception as error:
                errors.append(error)
            with self._changed:
                self._running -= 1
                self._progress()  # who waits for this rank will find itself stuck

        self._running = len(self._ranks)
        threads = [Thread(target=work, args=(rank,)) for rank in self._ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


@dataclass(frozen=True)
class End:
    """What a group calls on to send and receive."""

    net: Network
    rank: int
    channel: str

    def send(self, tensor: Tensor, to: int, tag: int) -> Message:
        return self.net.start(self.rank, to, self.channel, Message(self.net, tensor, True, tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Message:
        return self.net.start(self.rank, source, self.channel, Message(self.net, tensor, False, tag))
