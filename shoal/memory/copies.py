"""Copies between the memory of the device and that of the host, beside what the device computes.

On CUDA they run on two streams of their own, one in each direction, and events order them: nobody waits but the stream
that needs the result. Without a GPU a copy is done when it has begun.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Copy:
    """A copy under way; it keeps what it reads and what it writes until :meth:`join` or :meth:`wait`, or until it is
    let go of."""

    def __init__(self, event: torch.cuda.Event | None = None, *between: Tensor) -> None:
        self.event, self._between = event, between

    def join(self) -> None:
        """What the device is asked for from now on happens after the copy."""
        if self.event is not None and self._between:
            torch.cuda.current_stream().wait_event(self.event)
        self._between = ()

    def wait(self) -> None:
        """Until it is done: the host may use what was copied, and reuse what it was copied from."""
        if self.event is not None:
            self.event.synchronize()
        self.event, self._between = None, ()

    def __del__(self) -> None:
        self.join()  # the memory goes back to be used by what the device is asked for next


class Copies:
    """Of one ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if self.pinned else None
        self._in = torch.cuda.Stream(device) if self.pinned else None

    def start(self, into: Tensor, source: Tensor, after: torch.cuda.Event | None = None) -> Copy:
        """Begin to copy ``source`` to ``into``, of one size and dtype, one of them on the host (pinned, where that
        matters), when everything that the device has been asked for is done, and what ``after`` marks the end of."""
        if self._out is None or self._in is None:
            into.copy_(source)
            return Copy()
        stream = self._in if into.is_cuda else self._out
        stream.wait_stream(torch.cuda.current_stream())
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return Copy(event, into, source)

    def coming_in(self) -> AbstractContextManager[object]:
        """What the device begins meanwhile comes after the copies to it that have begun, and waits for nothing else."""
        return nullcontext() if self._in is None else torch.cuda.stream(self._in)
