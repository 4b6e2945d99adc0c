"""What a step of training came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """One finished optimizer step.

    ``loss`` is the mean over the ``weight`` positions (or samples) of the whole step, all ranks together;
    ``grad_norm`` that of all gradients before clipping; ``lr`` the rate that was applied: 0 where the step was
    ``skipped``, because a gradient was not finite. Under PipeDream, where each micro-batch is an update of each stage,
    the norm is the root mean square over them, ``skipped`` says that a stage has skipped one, alone: of those of
    ``micro_batches``, counted from 0 in the step; and ``lr`` is 0 only where this rank's stage has skipped all of them.

    ``age`` is how many of the steps before it had not been applied to the weights that its gradients were made with,
    under servers that are that far behind.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    weight: float
    skipped: bool = False
    micro_batches: tuple[int, ...] = ()
    age: int = 0
