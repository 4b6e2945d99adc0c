"""Messages from one rank to another.

Both sides of a message start it and go on; it moves when both have. Messages of one tag between two ranks arrive in the
order in which they were sent. NCCL knows no tags: there all messages between two ranks over one group, whichever way
they go, move in the order in which each side starts them, which must be one order. What has no such order needs a
channel of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.collectives import MESSAGE_TAGS, Pending
from shoal.comm.messages import receive, send
from shoal.comm.world import Group


def connect(group: Group, source: int, to: int, device: torch.device) -> None:
    """Open the way from the rank at place ``source`` of ``group`` to that at ``to``. Both call this and wait here.

    NCCL connects two ranks in their first message, and both sides stand still until the other has come to it. It must
    not be one that is started ahead of what the other side waits for.
    """
    word, tag = torch.zeros(1, device=device), MESSAGE_TAGS.start
    work = send(word, group, to, tag) if group.index == source else receive(word, group, source, tag)
    work.wait()


def start_send(tensor: Tensor, group: Group, to: int, tag: int) -> Pending:
    """Begin to send ``tensor`` (contiguous, without gradient) to the rank at place ``to`` of ``group``.

    It may not be written to before :meth:`Pending.wait` has returned, which is when the other side has received it.
    """
    assert tensor.is_contiguous(), "a message is one block of memory"
    assert tag in MESSAGE_TAGS, f"tag {tag} is for exchanges"
    return Pending(send(tensor, group, to, tag))


def start_receive(tensor: Tensor, group: Group, source: int, tag: int, purpose: str) -> Pending:
    """Begin to receive into ``tensor`` (contiguous, of the size that is sent) from the rank at place ``source``.

    The words are entered in the ledger, here alone. A size that differs from what is sent ends the process under gloo.
    """
    assert tensor.is_contiguous(), "a message is one block of memory"
    group.ledger.receive(tensor.numel(), group.axis, purpose)
    return Pending(receive(tensor, group, source, tag))
