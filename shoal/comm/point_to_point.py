"""Messages from one rank to another.

Both sides of a message start it and go on; it moves when both have. Messages of one tag between two ranks arrive in the
order in which they were sent. NCCL knows no tags, so there all messages between two ranks must be sent and received in
one order.
"""

from __future__ import annotations

from torch import Tensor

from shoal.comm.collectives import Pending
from shoal.comm.world import Group


def start_send(tensor: Tensor, group: Group, to: int, tag: int) -> Pending:
    """Begin to send ``tensor`` (contiguous, without gradient) to the rank at place ``to`` of ``group``.

    It may not be written to before :meth:`Pending.wait` has returned, which is when the other side has received it.
    """
    assert tensor.is_contiguous(), "a message is one block of memory"
    assert group.handle is not None, "nobody to send to"
    return Pending(group.handle.send([tensor], to, tag))


def start_receive(tensor: Tensor, group: Group, source: int, tag: int, purpose: str) -> Pending:
    """Begin to receive into ``tensor`` (contiguous, of the size that is sent) from the rank at place ``source``.

    The words are entered in the ledger, here alone. A size that differs from what is sent ends the process under gloo.
    """
    assert tensor.is_contiguous(), "a message is one block of memory"
    assert group.handle is not None, "nobody to receive from"
    group.ledger.receive(tensor.numel(), group.axis, purpose)
    return Pending(group.handle.recv([tensor], source, tag))
