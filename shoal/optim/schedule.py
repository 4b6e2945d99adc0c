"""The learning rate of each step, as a share of the highest."""

from __future__ import annotations

from math import cos, pi

from shoal.config import Schedule


def rate(schedule: Schedule, step: int, steps: int) -> float:
    """The share of the highest learning rate at ``step`` (from 0) of a run of ``steps``.

    After a linear warm-up that reaches 1 at step ``warmup``: *constant* stays at 1; *linear* falls to ``floor`` at the
    last step along a line, *cosine* along half a cosine (Loshchilov & Hutter 2017); *wsd* (warm-up, stable, decay; Hu
    et al. 2024) stays at 1 and falls linearly to ``floor`` over the last share ``decay`` of the steps.
    """
    warm = min(1.0, (step + 1) / (schedule.warmup + 1))
    last = max(steps - 1, 1)
    match schedule.kind:
        case "constant":
            return warm
        case "linear" | "cosine":
            progress = min(1.0, max(0, step - schedule.warmup) / max(1, last - schedule.warmup))
            left = 1 - progress if schedule.kind == "linear" else 0.5 * (1 + cos(pi * progress))
            return min(warm, schedule.floor + (1 - schedule.floor) * left)
        case "wsd":
            length = schedule.decay * steps
            progress = min(1.0, max(0.0, (step - (last - length)) / length)) if length else 0.0
            return min(warm, 1 - (1 - schedule.floor) * progress)
