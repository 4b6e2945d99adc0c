"""The collectives Shoal uses, those that move tensors entered in the ledger.

All take a :class:`~shoal.comm.world.Group` and write into tensors they are given; in a group of one rank nothing is
moved between ranks. ``purpose`` says what the words are for ("gradients", "norm", …).

gloo has no reduce-scatter of its own: it reduces everything everywhere, which moves twice the words. Under gloo ranks
therefore exchange the terms of each other's parts and add them up. Its reduce to one rank scatters the sum first and
gathers it then, for (p+1)/p of the words; there the terms are messages to that rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.messages import Work, receive, send
from shoal.comm.world import Group

Reduction = Literal["sum", "max", "min"]
_TERM_TAG = 1 << 30  # of the messages of a reduce
_LANDINGS = 2
MESSAGE_TAGS = range(_TERM_TAG)
"""Those of all other messages (:mod:`shoal.comm.point_to_point`)."""
FEW = 4
"""Up to so many ranks a gather under gloo is a broadcast from each: the same words, for less of the processor's time
(measured on 2 and 4 ranks, with 64 KiB to 768 KiB a rank: half and two thirds)."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


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
    if group.handle is None:
        return Pending(None)
    group.ledger.record("all_reduce", tensor.numel(), group.size, group.axis, purpose)
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[reduction]  # type: ignore[assignment]  # the stub knows one of the two names
    return Pending(group.handle.allreduce([tensor], options), group, purpose)


def all_reduce(tensor: Tensor, group: Group, purpose: str, reduction: Reduction = "sum") -> None:
    """Reduce ``tensor`` (contiguous) over ``group`` in place."""
    start_all_reduce(tensor, group, purpose, reduction).wait()


def start_all_gather(out: Tensor, part: Tensor, group: Group, purpose: str) -> Pending:
    """Begin to collect every rank's ``part`` (contiguous, of one size on all ranks) in ``out``, flat, in the group's
    order. ``part`` may be this rank's own slice of ``out``."""
    parts = _parts(out, part, group)
    own = parts[group.index]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part.view(-1))
    if group.handle is None:
        return Pending(None)
    group.ledger.record("all_gather", out.numel(), group.size, group.axis, purpose)
    if group.backend == "gloo" and group.size <= FEW:
        as_bytes = [one.view(torch.uint8) for one in parts]  # gloo broadcasts numbers of a few dtypes
        return Pending(_Broadcasts(group, as_bytes), group, purpose)
    return Pending(group.handle._allgather_base(out, own), group, purpose)


def start_reduce_scatter(out: Tensor, tensor: Tensor, group: Group, purpose: str) -> Pending:
    """Begin to sum the ranks' ``tensor`` (flat, one part a rank, in the group's order) and give each rank its part in
    ``out`` (contiguous). ``out`` may be this rank's own part of ``tensor``. A part's terms are always added up in one
    order."""
    parts = _parts(tensor, out, group)
    flat, own = out.view(-1), parts[group.index]
    if group.handle is None:
        flat.copy_(own)
        return Pending(None)
    group.ledger.record("reduce_scatter", tensor.numel(), group.size, group.axis, purpose)
    if group.backend == "nccl":
        return Pending(group.handle._reduce_scatter_base(flat, tensor), group, purpose)
    return Pending(_Terms(tensor, flat, group) if tensor.numel() else None, group, purpose)


def start_exchange(
    into: Tensor, taken: Sequence[int], out: Tensor, given: Sequence[int], group: Group, purpose: str
) -> Pending:
    """Begin to send ``given[i]`` elements of ``out`` to rank i of ``group``, and to receive ``taken[i]`` elements of
    ``into`` from it, both flat and in the group's order. Ranks agree on the sizes beforehand; none is for the rank
    itself.

    Words count where they are received.
    """
    assert taken[group.index] == given[group.index] == 0, "what a rank has for itself stays"
    if group.handle is None:
        return Pending(None)
    group.ledger.receive(into.numel(), group.axis, purpose)
    work = group.handle.alltoall_base(into, out, list(taken), list(given), dist.AllToAllOptions())
    return Pending(work, group, purpose)


def _parts(full: Tensor, part: Tensor, group: Group) -> tuple[Tensor, ...]:
    """``full`` cut into one part a rank."""
    assert full.ndim == 1, f"not flat: {tuple(full.shape)}"
    assert full.is_contiguous() and part.is_contiguous() and full.dtype == part.dtype  # noqa: PT018
    assert full.numel() == group.size * part.numel(), f"{full.numel()} words for {group.size} × {part.numel()}"
    return full.tensor_split(group.size)


class _Terms:
    """Every rank gets from each other one the term of its own part of ``tensor``, and adds them up in ``out``."""

    def __init__(self, tensor: Tensor, out: Tensor, group: Group) -> None:
        assert group.handle is not None
        landing = torch.empty_like(tensor)
        self._terms, self._out = landing.tensor_split(group.size), out
        self._work = group.handle.alltoall_base(landing, tensor, [], [], dist.AllToAllOptions())

    def wait(self) -> None:
        self._work.wait()
        first, second, *rest = self._terms
        torch.add(first, second, out=self._out)
        for term in rest:
            self._out.add_(term)


class _Broadcasts:
    """Every rank sends its own of ``parts`` to all."""

    def __init__(self, group: Group, parts: Sequence[Tensor]) -> None:
        self._works = [_broadcast(part, group, source) for source, part in enumerate(parts)]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def start_broadcast(tensor: Tensor, group: Group, purpose: str, source: int = 0) -> Pending:
    """Begin to copy the ``tensor`` (contiguous) of one rank, by its place in the group, to all its ranks."""
    assert tensor.is_contiguous(), "a message is one block of memory"
    if group.handle is None:
        return Pending(None)
    group.ledger.record("broadcast", tensor.numel(), group.size, group.axis, purpose)
    return Pending(_broadcast(tensor, group, source), group, purpose)


def broadcast(tensor: Tensor, group: Group, purpose: str, source: int = 0) -> None:
    """Copy the ``tensor`` (contiguous) of one rank, by its place in the group, to all its ranks."""
    start_broadcast(tensor, group, purpose, source).wait()


def start_reduce(tensor: Tensor, group: Group, purpose: str, root: int) -> Pending:
    """Begin to sum the ranks' ``tensor`` (contiguous) into that of one rank, by its place in the group. Those of the
    others may afterwards hold anything.

    The terms are always added up in one order. Reduces of one group are waited for in the order they were started in.
    """
    assert tensor.is_contiguous(), "a message is one block of memory"
    if group.handle is None:
        return Pending(None)
    group.ledger.record("reduce", tensor.numel(), group.size, group.axis, purpose)
    if group.backend == "nccl":
        options = dist.ReduceOptions()
        options.rootRank = root
        return Pending(group.handle.reduce([tensor], options), group, purpose)
    if not tensor.numel():
        return Pending(None)
    if group.index != root:
        return Pending(_hand_over(tensor, group, root), group, purpose)
    return Pending(_Sum(tensor, group), group, purpose)


def _hand_over(term: Tensor, group: Group, root: int) -> Work:
    """Begin to give a rank a term of its sum. Between two ranks a broadcast is that, for less of the processor's
    time."""
    if group.size > 2:
        return send(term, group, root, _TERM_TAG)
    return _broadcast(term, group, group.index)


def _broadcast(tensor: Tensor, group: Group, source: int) -> Work:
    """Begin to broadcast."""
    assert group.handle is not None
    options = dist.BroadcastOptions()
    options.rootRank = source
    work: Work = group.handle.broadcast([tensor], options)
    return work


class _Sum:
    """Adds what every other rank of its group sends to ``tensor``. At most ``_LANDINGS`` terms are here at a time,
    however many ranks there are; the others stay where they come from."""

    def __init__(self, tensor: Tensor, group: Group) -> None:
        self._tensor, self._group = tensor, group
        self._sources = iter([(group.index - i) % group.size for i in range(1, group.size)])
        self._coming: deque[tuple[Tensor, Work]] = deque()
        for source in islice(self._sources, _LANDINGS):
            self._receive(torch.empty_like(tensor), source)

    def _receive(self, term: Tensor, source: int) -> None:
        group = self._group
        coming = receive(term, group, source, _TERM_TAG) if group.size > 2 else _broadcast(term, group, source)
        self._coming.append((term, coming))

    def wait(self) -> None:
        while self._coming:
            term, work = self._coming.popleft()
            work.wait()
            self._tensor.add_(term)
            for source in islice(self._sources, 1):
                self._receive(term, source)


def barrier(group: Group) -> None:
    """Return once every rank of ``group`` has called this."""
    if group.handle is not None:
        group.handle.barrier().wait()


def all_gather_bytes(data: bytes, group: Group, device: torch.device) -> list[bytes]:
    """Every rank's ``data``, in the group's order. Bytes, not objects: nothing is unpickled between ranks."""
    if group.handle is None:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in group.ranks]
    group.handle.allgather([sizes], [torch.tensor([len(data)], device=device)]).wait()
    lengths = [int(size.item()) for size in sizes]
    width = max(1, *lengths)
    mine = torch.zeros(width, dtype=torch.uint8, device=device)
    mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].to(device)
    parts = [torch.empty_like(mine) for _ in group.ranks]
    group.handle.allgather([parts], [mine]).wait()
    return [bytes(part[:n].cpu().numpy().tobytes()) for part, n in zip(parts, lengths, strict=True)]
