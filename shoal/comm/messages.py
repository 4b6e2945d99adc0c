"""One message between two ranks of a group, out of and into tensors wherever these are.

gloo moves the host's memory alone, so what it sends between GPUs is staged there.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shoal.comm.world import Group


class Work(Protocol):
    """What can be waited for: a ``dist.Work``, or several of them."""

    def wait(self) -> object: ...


def send(tensor: Tensor, group: Group, to: int, tag: int) -> Work:
    """Begin to send ``tensor`` (contiguous) to the rank at place ``to``, under ``tag``."""
    assert group.handle is not None, "nobody to send to"
    work: Work = group.handle.send([tensor.cpu() if _staged(tensor, group) else tensor], to, tag)
    return work


def receive(tensor: Tensor, group: Group, source: int, tag: int) -> Work:
    """Begin to receive into ``tensor`` (contiguous) what the rank at place ``source`` sends under ``tag``."""
    assert group.handle is not None, "nobody to receive from"
    if _staged(tensor, group):
        return _Landing(tensor, group, source, tag)
    work: Work = group.handle.recv([tensor], source, tag)
    return work


def _staged(tensor: Tensor, group: Group) -> bool:
    return tensor.is_cuda and group.backend == "gloo"


class _Landing:
    """A message on its way to the host, and from there to ``tensor``."""

    def __init__(self, tensor: Tensor, group: Group, source: int, tag: int) -> None:
        self._tensor = tensor
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        assert group.handle is not None
        self._work: Work = group.handle.recv([self._host], source, tag)

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._host)
