"""The collectives Shoal uses, those that move tensors entered in the ledger.

All take a :class:`~shoal.comm.world.Group` and write into tensors they are given; in a group of one rank nothing is
moved between ranks. ``purpose`` says what the words are for ("gradients", "norm", …). Who moves them is for
:mod:`shoal.comm.backends`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.backends import Reduction, Work
from shoal.comm.world import Group
from shoal.storage import same_place


class Pending:
    """A collective under way; :meth:`wait` returns when its result may be read.

    Until then nobody may write to what it reads or touch what it writes.
    """

    def __init__(self, work: Work | None, group: Group | None = None, purpose: str = "") -> None:
        self._work, self._group, self._purpose = work, group, purpose

    def wait(self) -> None:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                if self._group is not None:
                    error.add_note(f"nothing from {_others(self._group)} while exchanging: {self._purpose}")
                raise
            self._work = None


def _others(group: Group) -> str:
    ranks = [str(rank) for rank in group.ranks if rank != group.rank]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"one of ranks {', '.join(ranks)}"


def start_all_reduce(tensor: Tensor, group: Group, purpose: str, reduction: Reduction = "sum") -> Pending:
    """Begin to reduce ``tensor`` (contiguous) over ``group`` in place."""
    if group.backend is None:
        return Pending(None)
    group.ledger.record("all_reduce", tensor.numel(), group.size, group.axis, purpose, tensor.itemsize)
    return Pending(group.backend.all_reduce(tensor, reduction), group, purpose)


def all_reduce(tensor: Tensor, group: Group, purpose: str, reduction: Reduction = "sum") -> None:
    """Reduce ``tensor`` (contiguous) over ``group`` in place."""
    start_all_reduce(tensor, group, purpose, reduction).wait()


def start_all_gather(out: Tensor, part: Tensor, group: Group, purpose: str) -> Pending:
    """Begin to collect every rank's ``part`` (contiguous, of one size on all ranks) in ``out``, flat, in the group's
    order. ``part`` may be this rank's own slice of ``out``; others may read it until the wait is over."""
    parts = _parts(out, part, group)
    own = parts[group.index]
    if not same_place(own, part):
        own.copy_(part.view(-1))
    if group.backend is None:
        return Pending(None)
    group.ledger.record("all_gather", out.numel(), group.size, group.axis, purpose, out.itemsize)
    return Pending(group.backend.all_gather(parts, part), group, purpose)


def start_reduce_scatter(out: Tensor, tensor: Tensor, group: Group, purpose: str) -> Pending:
    """Begin to sum the ranks' ``tensor`` (flat, one part a rank, in the group's order) and give each rank its part in
    ``out`` (contiguous). ``out`` may be this rank's own part of ``tensor``. A part's terms are always added up in one
    order."""
    parts = _parts(tensor, out, group)
    flat, own = out.view(-1), parts[group.index]
    if group.backend is None:
        flat.copy_(own)
        return Pending(None)
    group.ledger.record("reduce_scatter", tensor.numel(), group.size, group.axis, purpose, tensor.itemsize)
    return Pending(group.backend.reduce_scatter(flat, parts), group, purpose)


def start_exchange(
    into: Tensor, taken: Sequence[int], out: Tensor, given: Sequence[int], group: Group, purpose: str
) -> Pending:
    """Begin to send ``given[i]`` elements of ``out`` to rank i of ``group``, and to receive ``taken[i]`` elements of
    ``into`` from it, both flat and in the group's order. Ranks agree on the sizes beforehand; none is for the rank
    itself.

    Words count where they are received.
    """
    assert taken[group.index] == given[group.index] == 0, "what a rank has for itself stays"
    if group.backend is None:
        return Pending(None)
    group.ledger.receive(into.numel(), group.axis, purpose, into.itemsize, "exchange")
    return Pending(group.backend.exchange(into, taken, out, given), group, purpose)


def _parts(full: Tensor, part: Tensor, group: Group) -> tuple[Tensor, ...]:
    """``full`` cut into one part a rank."""
    assert full.ndim == 1, f"not flat: {tuple(full.shape)}"
    assert full.is_contiguous() and part.is_contiguous() and full.dtype == part.dtype  # noqa: PT018
    assert full.numel() == group.size * part.numel(), f"{full.numel()} words for {group.size} × {part.numel()}"
    return full.view(group.size, part.numel()).unbind()


def start_broadcast(tensor: Tensor, group: Group, purpose: str, source: int = 0) -> Pending:
    """Begin to copy the ``tensor`` (contiguous) of one rank, by its place in the group, to all its ranks."""
    assert tensor.is_contiguous(), "a message is one block of memory"
    if group.backend is None:
        return Pending(None)
    group.ledger.record("broadcast", tensor.numel(), group.size, group.axis, purpose, tensor.itemsize)
    return Pending(group.backend.broadcast(tensor, source), group, purpose)


def broadcast(tensor: Tensor, group: Group, purpose: str, source: int = 0) -> None:
    """Copy the ``tensor`` (contiguous) of one rank, by its place in the group, to all its ranks."""
    start_broadcast(tensor, group, purpose, source).wait()


def start_reduce(tensor: Tensor, group: Group, purpose: str, root: int) -> Pending:
    """Begin to sum the ranks' ``tensor`` (contiguous) into that of one rank, by its place in the group. Those of the
    others may afterwards hold anything.

    The terms are always added up in one order. Reduces of one group are waited for in the order they were started in.
    """
    assert tensor.is_contiguous(), "a message is one block of memory"
    if group.backend is None:
        return Pending(None)
    group.ledger.record("reduce", tensor.numel(), group.size, group.axis, purpose, tensor.itemsize)
    return Pending(group.backend.reduce(tensor, root), group, purpose)


def barrier(group: Group) -> None:
    """Return once every rank of ``group`` has called this."""
    if group.backend is not None:
        group.backend.barrier().wait()


def all_gather_bytes(data: bytes, group: Group, device: torch.device) -> list[bytes]:
    """Every rank's ``data``, in the group's order. Bytes, not objects: nothing is unpickled between ranks."""
    if group.backend is None:
        return [data]
    lengths = torch.zeros(group.size, dtype=torch.int64, device=device)
    lengths[group.index] = len(data)
    group.backend.all_gather(lengths.split(1)).wait()
    width = max(1, int(lengths.max()))
    rows = torch.zeros(group.size, width, dtype=torch.uint8, device=device)
    rows[group.index, : len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].to(
        device
    )
    group.backend.all_gather(rows.view(-1).split(width)).wait()
    return [bytes(row[:length].cpu().numpy()) for row, length in zip(rows, lengths.tolist(), strict=True)]
