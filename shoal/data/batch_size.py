"""How many samples each step takes, and so with which sample it begins: a function of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSize:
    """``samples`` a step, until ``ramp``, pairs of (step, samples) with rising steps of at least 1, says another
    number from a step on. Steps are counted from 0."""

    samples: int
    ramp: tuple[tuple[int, int], ...] = ()

    def at(self, step: int) -> tuple[int, int]:
        """(number of the first sample, samples) of ``step``."""
        first = 0
        for begin, end, samples in self._spans():
            if end is None or step < end:
                return first + (step - begin) * samples, samples
            first += (end - begin) * samples
        raise AssertionError("the last span has no end")

    def sizes(self) -> list[int]:
        """Every number of samples that some step takes."""
        return [samples for _, _, samples in self._spans()]

    def _spans(self) -> Iterator[tuple[int, int | None, int]]:
        """(first step, the step behind the last or None, samples) while the number stays."""
        begins = [(0, self.samples), *self.ramp]
        ends = [*(step for step, _ in self.ramp), None]
        for (begin, samples), end in zip(begins, ends, strict=True):
            yield begin, end, samples
