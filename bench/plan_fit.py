"""Fits the constants of the time model to published runs: damped Gauss–Newton on logarithms, with a prior a constant.

The prior is the physical expectation and how sure it is; a constant that the rows say nothing about stays there. Large
errors count by their size and not its square, so that a few odd rows do not bend the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from math import exp, log
from typing import NamedTuple

import numpy as np

from bench.plan_rows import Row
from shoal.plan.cost import StepTimes
from shoal.plan.kernels import family_of
from shoal.plan.profile import PROFILES
from shoal.plan.work import Job

_STEP = 0.02
_ROBUST = 0.15
"""Relative errors from which on a row counts by their size."""


class Prior(NamedTuple):
    """What a constant is expected to be, within a factor of ``exp(spread)``."""

    value: float
    spread: float


FAMILIES = ("volta", "ampere", "hopper", "blackwell", "blackwell-ultra")

PRIORS: dict[str, Prior] = {
    **{f"rate.{family}": Prior(1.0, 0.1) for family in FAMILIES},
    **{f"link.{family}": Prior(0.75, 0.15) for family in FAMILIES},
    "rate.8bit": Prior(0.9, 0.2),
    "rate.4bit": Prior(0.7, 0.3),
    "memory.efficiency": Prior(0.8, 0.1),
    "matmul.ramp": Prior(200.0, 0.5),
    "matmul.tiles": Prior(0.5, 0.4),
    "launch.eager": Prior(8.0, 0.4),
    "launch.graph": Prior(3.0, 0.4),
    # Of the sustained matrix rate, in the limit of wide heads; of kernels that keep scores, bytes a score.
    **{f"attention.flash1.{family}": Prior(0.5, 0.3) for family in FAMILIES},
    **{f"attention.flash2.{family}": Prior(0.65, 0.3) for family in FAMILIES},
    **{f"attention.cudnn.{family}": Prior(0.75, 0.3) for family in FAMILIES},
    "attention.odd": Prior(0.2, 0.5),
    "attention.fused-softmax": Prior(14.0, 0.4),
    "attention.unfused": Prior(30.0, 0.4),
    "attention.head": Prior(32.0, 0.4),
    # How many times the bytes of wholly fused kernels.
    "elementwise.fused": Prior(1.2, 0.3),
    "elementwise.compiled": Prior(1.2, 0.3),
    "elementwise.torch": Prior(2.0, 0.4),
    "elementwise.eager": Prior(2.5, 0.4),
    "loss.bytes": Prior(8.0, 0.4),
    "nic.efficiency": Prior(0.75, 0.25),
    "link.ramp": Prior(2.0, 0.7),
    "latency.inside": Prior(15.0, 0.5),
    "latency.outside": Prior(30.0, 0.5),
    "latency.hop": Prior(4.0, 0.7),
    "context.hop": Prior(30.0, 0.7),
    "pipeline.send": Prior(1.5, 0.5),
    "overlap.tensor": Prior(0.5, 0.4),
    "overlap.experts": Prior(0.7, 0.4),
    "overlap.slowdown": Prior(0.2, 0.6),
    "experts.imbalance": Prior(0.1, 0.7),
    "optimizer.passes": Prior(1.3, 0.4),
    "jitter": Prior(0.01, 0.6),
    **{f"pace.{name}": Prior(1.0, 0.08) for name in PROFILES},
}
# Not fitted.
FIXED = {
    "rate.other": 1.0,
    "link.other": 0.7,
    "attention.flash2.other": 0.4,
    "attention.cudnn.other": 0.5,
    "attention.flash1.other": 0.3,
    "pace.shoal": 1.0,
}
for _name in FIXED:
    PRIORS.pop(_name, None)
NAMES = tuple(PRIORS)

Values = dict[str, float]


def start() -> Values:
    """The constants before anything has been fitted."""
    return {name: prior.value for name, prior in PRIORS.items()} | FIXED


def predict(rows: Sequence[Row], values: Values) -> np.ndarray:
    """Seconds of a step, by row."""
    known: dict[Job, StepTimes] = {}
    found = []
    for row in rows:
        if (times := known.get(row.job)) is None:
            times = known[row.job] = StepTimes(row.job, values)
        found.append(times.estimate(row.split).step_s)
    return np.array(found)


def _concerned(name: str, row: Row) -> bool:
    """Whether a constant may matter for a row."""
    what, _, of = name.partition(".")
    profile, family = row.job.profile, family_of(row.job.cluster.device)
    match what:
        case "rate" | "link" if of in FAMILIES:
            return of == family
        case "rate":
            return row.job.bits == int(of[0])
        case "attention":
            fused = f"{profile.attention}.{family}"
            return of in (profile.attention, fused, "head", "odd")
        case "elementwise":
            return of == profile.kernels
        case "launch":
            return of == profile.host
        case "experts":
            return bool(row.job.shape.experts)
        case "context":
            return row.split.cp > 1
        case "pipeline":
            return row.split.pp > 1
    if name == "overlap.experts":
        return bool(row.job.shape.experts) and profile.hides_experts
    if name == "overlap.tensor":
        return profile.hides_tensor and row.split.tp > 1
    return True


def _moved(rows: Sequence[Row], base: np.ndarray, values: Values, name: str) -> np.ndarray:
    """The derivative by one constant. A profile's pace multiplies all there is."""
    slopes = np.zeros(len(rows))
    if name.startswith("pace."):
        return np.array([float(name == f"pace.{row.job.profile.name}") for row in rows])
    touched = [number for number, row in enumerate(rows) if _concerned(name, row)]
    moved = predict([rows[number] for number in touched], values | {name: values[name] * exp(_STEP)})
    slopes[touched] = (np.log(moved) - base[touched]) / _STEP
    return slopes


def jacobian(rows: Sequence[Row], values: Values) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of predictions, and their derivatives by logarithms of the constants."""
    base = np.log(predict(rows, values))
    with ProcessPoolExecutor(2) as pool:
        tasks = [pool.submit(_moved, rows, base, values, name) for name in NAMES]
        columns = [task.result() for task in tasks]
    return base, np.stack(columns, axis=1)


def solve(
    base: np.ndarray, slopes: np.ndarray, seconds: np.ndarray, weights: np.ndarray, values: Values, most: float = 0.5
) -> Values:
    """One Gauss–Newton step from ``values``, none of the constants moving by more than a factor of ``exp(most)``."""
    at = np.array([log(values[name]) for name in NAMES])
    priors = np.array([log(PRIORS[name].value) for name in NAMES])
    spreads = np.array([PRIORS[name].spread for name in NAMES])
    # A row is worth its weight over the noise that rows have.
    noise = 0.08
    moves = np.zeros(len(NAMES))
    for _ in range(8):
        residuals = np.log(seconds) - base - slopes @ moves
        scale = weights / noise**2 / np.maximum(1.0, np.abs(residuals) / _ROBUST)
        normal = slopes.T @ (scale[:, None] * slopes) + np.diag(1 / spreads**2)
        right = slopes.T @ (scale * (np.log(seconds) - base)) + (priors - at) / spreads**2
        moves = np.clip(np.linalg.solve(normal, right), -most, most)
    return {name: exp(a + m) for name, a, m in zip(NAMES, at, moves, strict=True)} | FIXED


def weigh(rows: Sequence[Row]) -> np.ndarray:
    """Rows of one set share their worth, so that a set of fifty tells as much as seven that stand alone."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.grid] = counts.get(row.grid, 0) + 1
    return np.array([counts[row.grid] ** -0.5 for row in rows])


def fit(rows: Sequence[Row], rounds: int = 4, values: Values | None = None) -> Values:
    """The constants of all ``rows``."""
    values = values or start()
    seconds = np.array([row.seconds for row in rows])
    weights = weigh(rows)
    for _ in range(rounds):
        base, slopes = jacobian(rows, values)
        values = solve(base, slopes, seconds, weights, values)
    return values
