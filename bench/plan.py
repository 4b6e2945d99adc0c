"""How far the planner is off, on published runs: ``make bench-plan``, or ``python -m bench.plan --data FOLDER``.

Time is judged on rows whose whole set (one source, model and device) was held out of the fit. Every set is held out
once: constants are fitted to one half of the sets, from their priors, and judged on the other, and the other way round.
Beside that, whole clusters are left out one at a time. The constants that ship are fitted to all rows, by ``--refit``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import exp
from pathlib import Path

import numpy as np

from bench import plan_fit, plan_memory, plan_rows
from bench.plan_rows import Row

_SHIPPED = Path(__file__).parents[1] / "shoal" / "plan" / "constants.json"
_CLUSTERS = {
    "BLOOM": "Jean Zay A100",
    "BLOOM-prequel": "Jean Zay A100",
    "Korthikanti2022": "Selene A100",
    "Narayanan2021": "Selene A100",
    "MT-NLG": "Selene A100",
}


def main() -> None:
    """Prints all lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    folder = os.environ.get("SHOAL_PLAN_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(folder), help="folder of published_*.jsonl")
    parser.add_argument("--refit", action="store_true", help="fit the constants to all rows and write them")
    parser.add_argument("--memory", action="store_true", help="memory alone, which takes seconds")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    if not given.data.is_dir():
        parser.error(f"--data {given.data}: there is no such folder; it holds published_runs.jsonl and others")
    rows, left = plan_rows.read(given.data / "published_runs.jsonl")
    if not given.memory:
        time(rows, left, given.rounds, given.refit)
    plan_memory.report(given.data, rows)


def time(rows: list[Row], left: dict[str, int], rounds: int, refit: bool) -> None:
    """Step time, held out."""
    print(f"{len(rows)} rows; left out: " + ", ".join(f"{count} {reason}" for reason, count in left.items()))
    found = held_out(rows, rounds)
    print("\nheld-out step time, whole sets held out          rows   error  median  bias  scaled")
    for group in sorted({row.group for row in rows}, key=lambda g: -sum(row.group == g for row in rows)):
        _line(group, rows, found, [row.group == group for row in rows])
    _line("all", rows, found, [True] * len(rows))
    _line("1,024 GPUs and more", rows, found, [row.split.ranks >= 1024 for row in rows])
    print("(scaled: with one scale factor for each cluster)")
    clusters, shipped = left_out(rows, rounds)
    print("\nleave one cluster out                            rows   error  median  bias  scaled")
    names = np.array([_cluster(row) for row in rows])
    for name in dict.fromkeys(names):
        _line(name, rows, clusters, names == name)
    ranking(rows, found)
    if refit:
        errors = _errors(rows, found)
        _write(shipped, errors, len(rows))


def held_out(rows: Sequence[Row], rounds: int) -> np.ndarray:
    """Seconds of every row, from constants fitted to the other half of the sets."""
    sets = sorted({(row.group, row.grid) for row in rows})
    half = {grid: number % 2 for number, (_, grid) in enumerate(sets)}
    found = np.zeros(len(rows))
    for out in (0, 1):
        values = plan_fit.fit([row for row in rows if half[row.grid] != out], rounds)
        judged = [number for number, row in enumerate(rows) if half[row.grid] == out]
        found[judged] = plan_fit.predict([rows[number] for number in judged], values)
    return found


def left_out(rows: Sequence[Row], rounds: int) -> tuple[np.ndarray, plan_fit.Values]:
    """Seconds of every row, from constants fitted to other clusters, and the constants of all rows.

    The fit of all gives the point around which those without a cluster are solved."""
    values = plan_fit.fit(rows, rounds)
    base, slopes = plan_fit.jacobian(rows, values)
    seconds, weights = np.array([row.seconds for row in rows]), plan_fit.weigh(rows)
    names = np.array([_cluster(row) for row in rows])
    found = np.zeros(len(rows))
    for name in set(names):
        keep, out = names != name, np.flatnonzero(names == name)
        without = plan_fit.solve(base[keep], slopes[keep], seconds[keep], weights[keep], values, most=2.0)
        found[out] = plan_fit.predict([rows[number] for number in out], without)
    return found, values


def ranking(rows: Sequence[Row], found: np.ndarray) -> None:
    """Within each grid: how much slower than the best the model's choice is, and how well it orders pairs."""
    number = {id(row): n for n, row in enumerate(rows)}
    grids = plan_rows.grids(list(rows))
    regrets1, regrets3, taus = [], [], []
    for members in grids.values():
        real = np.array([row.seconds for row in members])
        said = np.array([found[number[id(row)]] for row in members])
        order = np.argsort(said)
        regrets1.append(real[order[0]] / real.min() - 1)
        regrets3.append(real[order[:3]].min() / real.min() - 1)
        signs = [np.sign(real[a] - real[b]) * np.sign(said[a] - said[b]) for a, b in combinations(range(len(real)), 2)]
        taus.append(float(np.mean(signs)))
    print(
        f"\nranking on {len(grids)} held-out grids of five and more: top-3 regret {_percent(np.mean(regrets3))}, ",
        end="",
    )
    print(f"top-1 {_percent(np.mean(regrets1))}, mean Kendall tau {np.mean(taus):.2f}")
    for name, first, third, tau in zip(grids, regrets1, regrets3, taus, strict=True):
        print(f"  {name:62s} {len(grids[name]):3d}  {_percent(first):>7s} {_percent(third):>7s}  {tau:5.2f}")


def _cluster(row: Row) -> str:
    device = row.job.cluster.device.name
    if row.group.startswith(("dgxc", "NeMo", "Megatron-Bridge")):
        return f"NVIDIA {device}"
    return _CLUSTERS.get(row.group, f"{row.group} {device}")


def _scaled(rows: Sequence[Row], ratios: np.ndarray) -> np.ndarray:
    """Ratios after one factor for each cluster."""
    members = defaultdict(list)
    for number, row in enumerate(rows):
        members[_cluster(row)].append(number)
    scaled = ratios.copy()
    for numbers in members.values():
        scaled[numbers] /= exp(np.median(np.log(ratios[numbers])))
    return scaled


def _line(name: str, rows: Sequence[Row], found: np.ndarray, chosen: Iterable[bool]) -> None:
    ratios = found / np.array([row.seconds for row in rows])
    scaled = _scaled(rows, ratios)
    mask = np.array(list(chosen))
    if not mask.any():
        return
    of, errors = ratios[mask], np.abs(ratios[mask] - 1)
    bias = exp(np.mean(np.log(of)))
    rest = _percent(np.mean(np.abs(scaled[mask] - 1)))
    mean, middle = _percent(np.mean(errors)), _percent(np.median(errors))
    print(f"  {name:46s} {mask.sum():4d}  {mean:>6s}  {middle:>6s} {bias:5.2f}  {rest:>6s}")


def _errors(rows: Sequence[Row], found: np.ndarray) -> dict[str, float]:
    ratios = found / np.array([row.seconds for row in rows])
    logs = np.log(ratios)
    large = np.array([row.split.ranks >= 1024 for row in rows])
    return {
        "mean": float(np.mean(np.abs(ratios - 1))),
        "large": float(np.mean(np.abs(ratios[large] - 1))),
        "low": float(np.quantile(logs, 0.1)),
        "high": float(np.quantile(logs, 0.9)),
    }


def _write(values: plan_fit.Values, errors: dict[str, float], rows: int) -> None:
    how = (
        f"Damped Gauss-Newton on logarithms of {rows} published step times (bench/plan_fit.py), with a prior for each "
        "constant. The errors are those of sets held out whole."
    )
    table = {
        "how": how,
        "errors": {name: round(value, 4) for name, value in errors.items()},
        "values": {name: float(f"{value:.4g}") for name, value in sorted(values.items())},
    }
    _SHIPPED.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


if __name__ == "__main__":
    main()
