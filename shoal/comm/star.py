"""Collectives with a centre: the terms of all ranks go to one of them, and what one has goes to all.

Where all ranks take the part of the centre in turn, an average over them tells what each receives; a parameter server
is the centre for good, and what it receives is what it must carry. So here words are entered in the ledger where they
are received: of p ranks with n words each, the centre takes in (p−1)·n, and each of the others n of what it hands out.
"""

from __future__ import annotations

from torch import Tensor

from shoal.comm.backends import Reduction
from shoal.comm.collectives import Pending
from shoal.comm.world import Group


def start_push(tensor: Tensor, group: Group, purpose: str, to: int, reduction: Reduction = "sum") -> Pending:
    """Begin to reduce the ranks' ``tensor`` (contiguous) into that of the rank at place ``to`` of ``group``. Those of
    the others may afterwards hold anything.

    The terms are always joined in one order. Pushes of one group are waited for in the order they were started in.
    """
    assert tensor.is_contiguous(), "a message is one block of memory"
    if group.backend is None:
        return Pending(None)
    words = (group.size - 1) * tensor.numel() if group.index == to else 0
    group.ledger.receive(words, group.axis, purpose, tensor.itemsize, "push")
    return Pending(group.backend.reduce(tensor, to, reduction), group, purpose)


def start_pull(tensor: Tensor, group: Group, purpose: str, source: int) -> Pending:
    """Begin to copy the ``tensor`` (contiguous) of the rank at place ``source`` of ``group`` to all its ranks."""
    assert tensor.is_contiguous(), "a message is one block of memory"
    if group.backend is None:
        return Pending(None)
    words = tensor.numel() if group.index != source else 0
    group.ledger.receive(words, group.axis, purpose, tensor.itemsize, "pull")
    return Pending(group.backend.broadcast(tensor, source), group, purpose)
