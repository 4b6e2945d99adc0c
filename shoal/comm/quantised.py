"""Collectives that move int8 blocks (:mod:`shoal.comm.blocks`), as in ZeRO++ (Wang et al. 2023, 2306.10209).

A number is rounded once for each time that it is sent, and added up in float32 at least: so a sum comes from an
exchange of all terms, not from a ring that would round at every rank. Tensors are flat and of a floating dtype. A group
of one rank rounds nothing. In the ledger the words are bytes, and their purpose says "int8".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.comm import collectives
from shoal.comm.blocks import pack, packed_bytes, unpack
from shoal.comm.collectives import Pending, start_exchange
from shoal.comm.world import Group
from shoal.storage import same_place


class _Then(Pending):
    """Ends with something to do, once."""

    def __init__(self, pending: Pending, then: Callable[[], None]) -> None:
        super().__init__(None)
        self._pending, self._then = pending, then

    def wait(self) -> None:
        self._pending.wait()
        then, self._then = self._then, _nothing
        then()


def _nothing() -> None:
    pass


def start_all_gather(out: Tensor, part: Tensor, group: Group, purpose: str) -> Pending:
    """Begin to collect every rank's ``part`` in ``out``, in the group's order (qwZ). The rank's own is rounded there as
    it is elsewhere, so that all have the same; ``part`` may be its slice of ``out``, which then is overwritten."""
    if group.backend is None:
        return collectives.start_all_gather(out, part, group, purpose)
    rows = part.new_empty((group.size, packed_bytes(part.numel())), dtype=torch.uint8)
    pack(part, rows[group.index])

    def arrived() -> None:
        for row, into in zip(rows, out.tensor_split(group.size), strict=True):
            unpack(row, into)

    return _Then(collectives.start_all_gather(rows.view(-1), rows[group.index], group, f"{purpose} int8"), arrived)


def start_reduce_scatter(out: Tensor, tensor: Tensor, group: Group, purpose: str) -> Pending:
    """Begin to sum the ranks' ``tensor`` (one part a rank, in the group's order) and give each rank its part in
    ``out`` (qgZ). That may be its own part of ``tensor``, which may be overwritten in any case. A rank's own term is
    exact; those of others are added to it in the group's order."""
    if group.backend is None:
        return collectives.start_reduce_scatter(out, tensor, group, purpose)
    parts, size = tensor.tensor_split(group.size), packed_bytes(out.numel())
    others = [part for place, part in enumerate(parts) if place != group.index]
    sent = tensor.new_empty((len(others), size), dtype=torch.uint8)
    for part, row in zip(others, sent, strict=True):
        pack(part, row)
    came = torch.empty_like(sent)
    sizes = [0 if place == group.index else size for place in range(group.size)]

    def arrived() -> None:
        total = parts[group.index].to(torch.promote_types(out.dtype, torch.float32))
        term = torch.empty_like(total)
        for row in came:
            unpack(row, term)
            total += term
        if not same_place(total, out):
            out.copy_(total)

    return _Then(start_exchange(came.view(-1), sizes, sent.view(-1), sizes, group, f"{purpose} int8"), arrived)


def start_all_reduce(tensor: Tensor, group: Group, purpose: str) -> Pending:
    """Begin to sum ``tensor`` over ``group`` in place: each rank adds up a part, and the sums are gathered, which
    begins when the first half is waited for. Ranks wait for those of one group in one order."""
    if group.backend is None:
        return collectives.start_all_reduce(tensor, group, purpose)
    each = -(-tensor.numel() // group.size)
    whole = tensor if each * group.size == tensor.numel() else tensor.new_zeros(each * group.size)
    whole[: tensor.numel()] = tensor
    part = whole.tensor_split(group.size)[group.index]

    def summed() -> None:
        start_all_gather(whole, part, group, purpose).wait()
        if whole is not tensor:
            tensor.copy_(whole[: tensor.numel()])

    return _Then(start_reduce_scatter(part, whole, group, purpose), summed)
