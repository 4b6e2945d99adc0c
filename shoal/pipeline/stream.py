"""Pipelines without a flush: one stream over many steps, cut where each step begins.

What a step does depends only on how many came before it, not on how many follow: a step leaves micro-batches in flight,
and their passes, drops and updates are found in later steps. So an engine may take the steps one by one and drain
whenever it needs all updates made: to save, to evaluate, to end. After a drain the stream begins anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from shoal.layout.kinds import SCHEDULES
from shoal.pipeline.faults import faults
from shoal.pipeline.lower import lower
from shoal.pipeline.program import STARTS, Op, Program, Programs
from shoal.pipeline.schedules.pipedream import pipedream, pipedream_vertical
from shoal.pipeline.schedules.two_bw import two_bw

STREAMS: dict[str, Callable[[int, int, int], Programs]] = {
    "pipedream": pipedream,
    "pipedream-vertical": pipedream_vertical,
    "2bw": two_bw,
}
"""By the name in a layout: from ranks, micro-batches a step, and steps."""


@dataclass(frozen=True)
class Stream:
    """What rank ``rank`` of ``ranks`` does in each step of ``micro_batches`` and in the drain.

    In the programs that it gives, micro-batches, and the batches of reductions, norms and updates, are counted from the
    first micro-batch of the step, or from the one that would follow the drain. Those of earlier steps are negative.
    """

    schedule: str
    ranks: int
    rank: int
    micro_batches: int
    _drains: dict[int, Program] = field(default_factory=dict, init=False, repr=False, compare=False)

    def step(self, k: int) -> Program:
        """The ``k``-th step since the stream began: one and the same object from where it repeats."""
        return self._steps[min(k, self._settled)]

    def drain(self, n: int) -> Program:
        """What is left after ``n`` steps, at least one: the backward passes in flight and the updates to be made. As
        with steps, one and the same object from where it repeats."""
        n = min(n, self._settled)
        if n not in self._drains:
            self._drains[n] = self._parts(n)[-1]
        return self._drains[n]

    @property
    def per_micro_batch(self) -> bool:
        """Whether each micro-batch is an update of its own, of each stage by itself."""
        return SCHEDULES[self.schedule].per_micro_batch

    @property
    def lag(self) -> int:
        """How many steps later than it began a step has been applied on every rank."""
        return -(-(self.ranks - 1) // self.micro_batches) if self.per_micro_batch else 2

    @property
    def oldest(self) -> int:
        """How many updates older than the newest the oldest weights are that a forward pass ever uses."""
        return max((age for step in self._steps for age in step.ages), default=0)

    @property
    def ways(self) -> Program:
        """Actions that take all the ways between ranks that any step or drain takes."""
        every = (*self._steps, self.drain(self._settled))
        return Program(every[0].stages, self.micro_batches, tuple(act for part in every for act in part.actions))

    @property
    def _settled(self) -> int:
        """The first step, and the first number of steps before a drain, from which all are alike.

        The passes of a step are those of the one before once the first rank is past its ranks − 1 forward passes ahead
        of the first backward pass. What is dropped before a pass was made known by one of the two micro-batches before.
        The first update of 2BW is in its third step.
        """
        return max(2, -(-(self.ranks + 1) // self.micro_batches))

    @cached_property
    def _steps(self) -> list[Program]:
        return self._parts(self._settled + 1)[:-1]

    def _parts(self, steps: int) -> list[Program]:
        programs = lower(STREAMS[self.schedule](self.ranks, self.micro_batches, steps))
        assert not (found := faults(programs)), found
        return cut(programs[self.rank], self.micro_batches)


def cut(program: Program, micro_batches: int) -> list[Program]:
    """The steps of a whole stream, each with its BEGIN, and its drain. Their micro-batches are counted from the first
    of each part."""
    actions = program.actions
    starts = [at for at, act in enumerate(actions) if act.op in STARTS]
    return [
        Program(
            program.stages,
            micro_batches,
            tuple(
                act._replace(micro_batch=act.micro_batch - step * micro_batches)
                for act in actions[start:stop]
                if act.op is not Op.DRAIN
            ),
            program.ages[step * micro_batches : (step + 1) * micro_batches],
        )
        for step, (start, stop) in enumerate(pairwise([*starts, len(actions)]))
    ]
