"""Two stages a rank in a V: micro-batches go down the ranks through the first half of the stages and back up through
the second. What schedules of that shape are written with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from shoal.pipeline.program import Act, Op, Program, Programs


class Vee:
    """The order of rank ``rank`` of ``ranks``, which holds stage ``rank`` (0) and stage 2·ranks − 1 − rank (1).

    A pass is written as its letter and its stage, 0 or 1: ``F0`` takes the next micro-batch of stage 0 forward, ``B1``
    or ``I1`` takes the next of stage 1 backward, ``W1`` the next that awaits its weights' gradients, and ``W`` that
    which has awaited them longest on either stage.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.stages = (rank, 2 * ranks - 1 - rank)
        self.order: list[Act] = []
        self._count: Counter[str] = Counter()
        self._halves: list[Act] = []

    def add(self, passes: str, times: int = 1) -> None:
        """Passes, separated by blanks."""
        for word in passes.split() * times:
            self.order.append(self._next(word[0], word[1:]))

    def count(self, word: str) -> int:
        """How many micro-batches have gone ``F0``, ``F1``, or ``B0`` or ``B1``, which includes I."""
        return self._count[word]

    def _next(self, letter: str, stage: str) -> Act:
        if letter == "W":
            half = next(act for act in self._halves if not stage or act.stage == self.stages[int(stage)])
            self._halves.remove(half)
            return Act(Op.WEIGHT_GRADIENT, half.stage, half.micro_batch)
        direction = ("F" if letter == "F" else "B") + stage
        act = Act(Op(letter), self.stages[int(stage)], self._count[direction])
        self._count[direction] += 1
        if letter == "I":
            self._halves.append(act)
        return act


def in_a_vee(ranks: int, micro_batches: int, least: int, write: Callable[[Vee, int, int, int], None]) -> Programs:
    """The programs that ``write(vee, rank, ranks, micro_batches)`` writes.

    It is asked for ``least`` micro-batches or more, and those that there are not are left out: micro-batches do not
    wait for each other, so what is left of a valid order is one.
    """
    programs = []
    for rank in range(ranks):
        vee = Vee(rank, ranks)
        write(vee, rank, ranks, max(micro_batches, least))
        order = tuple(act for act in vee.order if act.micro_batch < micro_batches)
        programs.append(Program(vee.stages, micro_batches, order))
    return tuple(programs)
