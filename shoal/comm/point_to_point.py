"""Messages from one rank to another.

Both sides of a message start it and go on; it moves when both have. Messages of one tag between two ranks arrive in the
order in which they were sent. NCCL knows no tags: there all messages between two ranks over one group, whichever way
they go, move in the order in which each side starts them, which must be one order. What has no such order needs a
channel of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.collectives import Pending
from shoal.comm.world import Group

MESSAGE_TAGS = range(1 << 30)


def connect(group: Group, source: int, to: int, device: torch.device) -> None:
    """Open the way from the rank at place ``source`` of ``group`` to that at ``to``. Both call this and wait here.

    NCCL connects two ranks in their first message, and both sides stand still until the other has come to it. It must
    not be one that is started ahead of what the other side waits for.
    """
    assert group.backend is not None, "nobody to meet"
    word, tag = torch.zeros(1, device=device), MESSAGE_TAGS.start
    meet = group.backend.send(word, to, tag) if group.index == source else group.backend.receive(word, source, tag)
    meet.wait()


def start_send(tensor: Tensor, group: Group, to: int, tag: int) -> Pending:
    """Begin to send ``tensor`` (contiguous, without gradient) to the rank at place ``to`` of ``group``.

    It may not be written to before :meth:`Pending.wait` has returned, which is when it has left or arrived.
    """
    assert tensor.is_contiguous(), "a message is one block of memory"
    assert tag in MESSAGE_TAGS, f"tag {tag} is for exchanges"
    assert group.backend is not None, "nobody to send to"
    return Pending(group.backend.send(tensor, to, tag))


def start_receive(tensor: Tensor, group: Group, source: int, tag: int, purpose: str) -> Pending:
    """Begin to receive into ``tensor`` (contiguous, of the size that is sent) from the rank at place ``source``.

    The words are entered in the ledger, here alone. A size that differs from what is sent ends the process under gloo.
    """
    assert tensor.is_contiguous(), "a message is one block of memory"
    assert group.backend is not None, "nobody to receive from"
    group.ledger.receive(tensor.numel(), group.axis, purpose, tensor.itemsize)
    return Pending(group.backend.receive(tensor, source, tag))
