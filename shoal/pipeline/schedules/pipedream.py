"""PipeDream (Narayanan et al. 2019, 1806.03377) with weight stashing: 1F1B without end, an update a micro-batch; and
with vertical sync, under which a micro-batch meets weights of one age on all stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoal.pipeline.program import Act, Op, Program, Programs
from shoal.pipeline.versions import versions_used


def pipedream(ranks: int, micro_batches: int, steps: int) -> Programs:
    """A stream of ``steps`` steps of ``micro_batches`` each, then its drain. One stage a rank, which updates its own
    weights after every backward pass. Any number of micro-batches will do.

    A forward pass uses the newest weights, and its backward pass the same. So on rank r the gradients of micro-batch t
    are those of weights that are ranks − 1 − r updates old, or of the first:
    W_r^(t+1) = W_r^(t) − u_r(∇_r f(W_0^(u_0(t)), W_1^(u_1(t)), …; x_t)), u_r(t) = max(0, t − (ranks − 1 − r)).
    """
    return tuple(
        Program((r,), micro_batches * steps, tuple(_order(r, ranks - 1 - r, micro_batches, steps)))
        for r in range(ranks)
    )


def pipedream_vertical(ranks: int, micro_batches: int, steps: int) -> Programs:
    """The stream of :func:`pipedream` with vertical sync (section 3.3): the passes of a micro-batch use, on every rank,
    the version of the weights that the first rank had when the micro-batch entered. Which one that is follows from the
    first rank's program, so nothing is sent for it.

    On every rank the gradients of micro-batch t are those of weights that are ranks − 1 updates old, or of the first:
    W^(t+1) = W^(t) − u(∇f(W^(max(0, t − ranks + 1)); x_t)). Each rank has ``ranks`` versions.
    """
    programs = pipedream(ranks, micro_batches, steps)
    entered = versions_used(programs[0])
    return tuple(
        replace(one, ages=tuple(newest - its for newest, its in zip(versions_used(one), entered, strict=True)))
        for one in programs
    )


def _order(stage: int, ahead: int, micro_batches: int, steps: int) -> Iterator[Act]:
    for act in without_flush(stage, ahead, micro_batches, steps):
        yield act
        if act.op is Op.BACKWARD:
            yield Act(Op.REDUCE, stage, act.micro_batch)
            yield Act(Op.NORM, micro_batch=act.micro_batch)
            yield Act(Op.UPDATE, micro_batch=act.micro_batch)


def without_flush(stage: int, ahead: int, micro_batches: int, steps: int) -> Iterator[Act]:
    """1F1B over a whole stream: ``ahead`` forward passes, then one of each kind in turn, and the backward passes that
    are left; with the beginning of each step and of the drain."""
    total = micro_batches * steps
    for b in range(total):
        if b % micro_batches == 0:
            yield Act(Op.BEGIN, micro_batch=b)
        yield Act(Op.FORWARD, stage, b)
        if b >= ahead:
            yield Act(Op.BACKWARD, stage, b - ahead)
    yield Act(Op.DRAIN)
    for b in range(max(total - ahead, 0), total):
        yield Act(Op.BACKWARD, stage, b)
