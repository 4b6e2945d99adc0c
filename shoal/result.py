"""What a step of training came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertLoad:
    """What the gates of a step came to: of each layer with experts the ``tokens`` that each expert was given, the share
    of them all that was ``dropped``, and the gates' own ``loss``, on average over the positions that count."""

    tokens: Mapping[str, tuple[int, ...]]
    dropped: float
    loss: float

    @property
    def largest(self) -> float:
        """The load of the most loaded expert of any layer over the mean of its layer."""
        return max(max(one) * len(one) / max(sum(one), 1) for one in self.tokens.values())


@dataclass(frozen=True)
class StepResult:
    """One finished optimizer step.

    ``loss`` is the mean over the ``weight`` positions (or samples) of the whole step, all ranks together;
    ``grad_norm`` that of all gradients before clipping; ``lr`` the rate that was applied: 0 where the step was
    ``skipped``, because a gradient was not finite. Under PipeDream, where each micro-batch is an update of each stage,
    the norm is the root mean square over them, ``skipped`` says that a stage has skipped one, alone: of those of
    ``micro_batches``, counted from 0 in the step; and ``lr`` is 0 only where this rank's stage has skipped all of them.

    ``age`` is how many of the steps before it had not been applied to the weights that its gradients were made with,
    under servers that are that far behind. ``experts`` is there for a model that has some, where steps do not overlap.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    weight: float
    skipped: bool = False
    micro_batches: tuple[int, ...] = ()
    age: int = 0
    experts: ExpertLoad | None = None
