"""Tokens on their way to their experts and back: an all-to-all in which only what moves is moved.

Each of G ranks has tokens, and some experts. What is to be computed is a list of pairs (token, expert), on the rank
that has the token sorted by the rank that has the expert, then by expert; where several ranks have parts of an expert,
the pair is there once for each, and what they make of it is summed with all else that comes back to the token. Ranks
tell each other how many pairs they have for each expert, and then send rows of just that many.

A row is copied once where it leaves, straight from among the tokens to its place in the message, and once where it
arrives, so that the rows of one expert follow one another. Rows for experts of this rank are not sent.

While rows travel there is time for other work: :func:`depart` begins to send, :func:`arrive` waits; backward the
gradients of rows begin to travel in the second and are waited for in the first, and what was computed between the two
has its backward pass between them.

Axes in names: N tokens here, P pairs of tokens here, M rows for experts here, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import Pending, start_all_gather, start_exchange
from shoal.comm.world import Group
from shoal.meter import mark
from shoal.model.choice import Choice
from shoal.model.routed import add_rows
from shoal.purposes import ACTIVATIONS, COMMUNICATION

PURPOSE = "experts"


@dataclass
class Trip:
    """Who sends what to whom, of one layer and micro-batch.

    ``tokens`` and ``experts`` int64 [P] are the pairs of the tokens here: those that leave, by rank, then those that
    stay. ``given`` and ``taken`` say how many rows go to and come from each rank; ``counts`` how many there are for
    each expert here. ``order`` int64 [M] says which of the rows that have come, and of those that have stayed, are one
    after another where experts see them; None for all in order.
    """

    group: Group
    tokens: Tensor
    experts: Tensor
    given: list[int]
    taken: list[int]
    counts: list[int]
    order: Tensor | None
    coming: tuple[Tensor, Pending] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, choice: Choice, group: Group, parts: int) -> Trip:
        """That of the tokens of a ``choice`` among experts that lie in order over the ranks of ``group``; of each of
        them ``parts`` neighbours have a part."""
        sources, mine = group.size // parts, group.index // parts
        table = _everyones_counts(choice.counts(), group)
        own = len(table[group.index]) // sources
        tokens, experts = choice.pairs()
        ends = [0, *accumulate(table[group.index])]
        segments = [(ends[at * own], ends[(at + 1) * own]) for at in range(sources)]
        leaving = [segments[rank // parts] for rank in range(group.size) if rank != group.index]
        order = [slice(*segment) for segment in (*leaving, segments[mine])]
        given = [stop - start for start, stop in (segments[rank // parts] for rank in range(group.size))]
        here = [row[mine * own : (mine + 1) * own] for row in table]
        taken = [sum(row) for row in here]
        given[group.index] = taken[group.index] = 0
        return cls(
            group,
            torch.cat([tokens[part] for part in order]),
            torch.cat([experts[part] for part in order]),
            given,
            taken,
            [sum(each) for each in zip(*here, strict=True)],
            _by_expert(here, group.index).to(tokens.device) if own > 1 and group.size > 1 else None,
        )

    def start(self, rows_NH: Tensor, tokens: Tensor | None) -> None:
        """Begin to send the rows of the pairs: those of ``tokens``, or as they are."""
        leave, come = sum(self.given), sum(self.taken)
        pairs = len(self.tokens) if tokens is None else len(tokens)
        room = rows_NH.new_empty(come + pairs - leave, rows_NH.shape[1])
        mark(COMMUNICATION, room)
        out = rows_NH[:leave] if tokens is None else rows_NH.index_select(0, tokens[:leave])
        pending = self._exchange(room[:come], self.taken, out, self.given)
        if tokens is None:
            room[come:] = rows_NH[leave:]
        else:
            torch.index_select(rows_NH, 0, tokens[leave:], out=room[come:])
        self.coming = room, pending

    def arrived(self) -> Tensor:
        """[M, H]: the rows that have come and stayed, by expert."""
        room = self._take()
        return room if self.order is None else room.index_select(0, self.order)

    def start_back(self, rows_MH: Tensor) -> None:
        """Begin to send rows by expert back to where they came from."""
        leave, come = sum(self.taken), sum(self.given)
        if self.order is not None:
            back = torch.empty_like(rows_MH)
            back[self.order] = rows_MH
            rows_MH = back
        room = rows_MH.new_empty(come + len(rows_MH) - leave, rows_MH.shape[1])
        mark(COMMUNICATION, room)
        pending = self._exchange(room[:come], self.given, rows_MH[:leave], self.taken)
        room[come:] = rows_MH[leave:]
        self.coming = room, pending

    def returned(self) -> Tensor:
        """[P, H]: those of the pairs."""
        return self._take()

    def _take(self) -> Tensor:
        assert self.coming is not None, "nothing is under way"
        (room, pending), self.coming = self.coming, None
        pending.wait()
        return room

    def _exchange(self, into: Tensor, taken: list[int], out: Tensor, given: list[int]) -> Pending:
        width = into.shape[1]
        sizes = [width * rows for rows in taken], [width * rows for rows in given]
        return start_exchange(into.view(-1), sizes[0], out.reshape(-1), sizes[1], self.group, PURPOSE)


def _everyones_counts(counts_E: Tensor, group: Group) -> list[list[int]]:
    """How many pairs each rank has for each expert."""
    table = counts_E.new_empty(group.size, len(counts_E))
    start_all_gather(table.view(-1), counts_E, group, "expert counts").wait()
    found: list[list[int]] = table.tolist()
    return found


def _by_expert(here: Sequence[Sequence[int]], own: int) -> Tensor:
    """Where the rows are that each expert sees, of rows that lie by source, this rank's ``own`` last: ``here`` says how
    many each source has for each expert."""
    sources = [*(at for at in range(len(here)) if at != own), own]
    sizes = torch.tensor([here[at] for at in sources])  # [source, expert]
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view(sizes.shape).t().flatten()
    by_expert = sizes.t().flatten()
    before = by_expert.cumsum(0) - by_expert
    return torch.arange(int(by_expert.sum())) + torch.repeat_interleave(starts - before, by_expert)


def depart(rows_NH: Tensor, trip: Trip) -> Tensor:
    """Begin to send the rows of ``trip``; returns what :func:`arrive` wants to see."""
    sent: Tensor = _Depart.apply(rows_NH, trip)  # type: ignore[no-untyped-call]
    return sent


def arrive(sent: Tensor, trip: Trip) -> Tensor:
    """The rows [M, H] that have come to the experts here."""
    rows: Tensor = _Arrive.apply(sent, trip)  # type: ignore[no-untyped-call]
    return rows


def give_back(rows_MH: Tensor, trip: Trip) -> Tensor:
    """What experts have made of their rows, for the pairs that these were of: [P, H]."""
    made: Tensor = _GiveBack.apply(rows_MH, trip)  # type: ignore[no-untyped-call]
    return made


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip, ctx.count = trip, len(rows)
        trip.start(rows, trip.tokens)
        return rows.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return add_rows(ctx.trip.returned(), ctx.trip.tokens, ctx.count), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        rows = trip.arrived()
        mark(ACTIVATIONS, rows)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start_back(grad.contiguous())
        return grad.new_zeros(()), None


class _GiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.start_back(rows)
        made = trip.returned()
        mark(ACTIVATIONS, made)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start(grad.contiguous(), None)
        return ctx.trip.arrived(), None
