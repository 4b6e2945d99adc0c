"""``python -m bench.plan_here``: what the planner says of this machine, beside what runs on it.

Layouts over every axis, of up to 4 ranks, are priced with what ``shoal calibrate`` has measured and run in turns, each
for a few steps and several times. None of the models is one that the calibration ran. A step's time is the shortest:
what others do on the machine only adds to it. Memory is predicted twice, by the planner's formulas and by the code of
the ranks run dry, and measured by the meter.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from shoal.cli import here
from shoal.cli.auto import peak_of
from shoal.config import Config
from shoal.layout import Layout
from shoal.plan.here import profile
from shoal.plan.layouts import split_of
from shoal.plan.search import Search
from shoal.plan.shape import of_model
from shoal.plan.work import Job
from shoal.train.pool import Pool
from shoal.train.setup import fit
from shoal.train.trial import Trial, trial

_DENSE = {"layers": 8, "hidden": 192, "heads": 8, "kv_heads": 4, "ffn": 512, "vocab": 1536}
_EXPERTS = {**_DENSE, "layers": 4, "ffn": 256, "experts": 8, "experts_per_token": 2, "gate_renormalise": True}
LAYOUTS = {
    "dense": (
        "dp=1",
        "mb=4,recompute=full",
        "dp=2",
        "dp=2,zero=1,mb=4",
        "dp=2,zero=3",
        "tp=2",
        "tp=2:1d-sp,mb=2",
        "pp=2:gpipe,mb=4",
        "pp=2:zb-h1,mb=4",
        "cp=2",
        "cp=2:ulysses",
        "cp=2:gather,mb=2",
        "dp=4,zero=1",
        "dp=2,tp=2,zero=1",
        "dp=2,pp=2,mb=4",
        "pp=4:1f1b,mb=8",
        "pp=4:interleaved/2,mb=8",
        "tp=4:1d-sp",
    ),
    "experts": ("dp=1", "dp=2", "dp=2,ep=2", "dp=4,ep=4,zero=1"),
}
_MODELS = {"dense": _DENSE, "experts": _EXPERTS}
_APART = 1.1
"""Times that differ by more are to be ordered right."""


def run_file(model: str) -> Config:
    """The run whose layouts are compared."""
    table = {"source": "synthetic", "seq_len": 128, "batch": 16}
    return Config.model_validate({"run": {"steps": 1}, "model": _MODELS[model], "data": table})


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where the table could be made."""
    parser = argparse.ArgumentParser(prog="python -m bench.plan_here", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each layout runs")
    parser.add_argument("--steps", type=int, default=5, help="timed steps each time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    known = here.known()
    if known is None:
        Console(stderr=True).print("run shoal calibrate first")
        return 2
    known = replace(known, devices={dtype: {1: of[1]} for dtype, of in known.devices.items()})
    cases = [(model, line) for model, lines in LAYOUTS.items() for line in lines]
    rows: list[dict[str, Any]] = []
    seen: list[list[Trial]] = [[] for _ in cases]
    loads = []
    with Pool(4) as pool:
        for number in track(range(options.rounds * len(cases)), disable=options.json):
            model, line = cases[number % len(cases)]
            config, plan = run_file(model), Layout.parse(line)
            seen[number % len(cases)].append(trial(config, fit(config, plan, plan.ranks), pool, options.steps))
            loads.append(os.getloadavg()[0])
    for (model, line), trials in zip(cases, seen, strict=True):
        config, plan = run_file(model), Layout.parse(line)
        plan = fit(config, plan, plan.ranks)
        machines, data = known.cluster(plan.ranks, plan.dtype), config.data
        job = Job(of_model(config.model), machines, data.seq_len, data.batch, profile(plan.dtype), plan.dtype)
        priced = Search(job, known.constants).price(split_of(plan, data.batch))
        rows.append(
            {
                "model": model,
                "layout": line,
                "predicted_s": priced.estimate.step_s,
                "measured_s": min(min(one.wall_s) for one in trials),
                "cpu_s": min(min(one.cpu_s) for one in trials),
                "formula_bytes": priced.held.total,
                "dry_bytes": peak_of(config, plan),
                "measured_bytes": max(one.peak_bytes for one in trials),
                "terms": dict(priced.estimate.terms),
            }
        )
    told = summary(rows) | {"load": median(loads)}
    if options.json:
        print(json.dumps({"rows": rows, **told}))
    else:
        show(rows, told)
    return 0


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median relative errors of time, as predicted and after one factor, and of memory; and the share of pairs of one
    model that are ordered right, of those apart by more than a tenth."""
    ratios = [row["predicted_s"] / row["measured_s"] for row in rows]
    factor = median(ratios)
    right = pairs = 0
    for one, other in combinations(rows, 2):
        apart = one["measured_s"] / other["measured_s"]
        if one["model"] == other["model"] and not 1 / _APART <= apart <= _APART:
            pairs += 1
            right += (one["predicted_s"] > other["predicted_s"]) == (apart > 1)
    return {
        "time": median(abs(ratio - 1) for ratio in ratios),
        "time_scaled": median(abs(ratio / factor - 1) for ratio in ratios),
        "factor": factor,
        "ordered": right / max(1, pairs),
        "pairs": pairs,
        "formula": median(abs(row["formula_bytes"] / row["measured_bytes"] - 1) for row in rows),
        "dry": max(abs(row["dry_bytes"] / row["measured_bytes"] - 1) for row in rows),
    }


def show(rows: Sequence[dict[str, Any]], told: dict[str, float]) -> None:
    """The table, and the summary in words."""
    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("predicted ms", "measured ms", "off", "formula MiB", "dry MiB", "measured MiB"):
        table.add_column(name, justify="right")
    table.add_column("layout")
    for row in rows:
        off = row["predicted_s"] / row["measured_s"] - 1
        memory = (f"{row[name] / 2**20:.1f}" for name in ("formula_bytes", "dry_bytes", "measured_bytes"))
        seconds = (f"{1e3 * row[name]:.0f}" for name in ("predicted_s", "measured_s"))
        table.add_row(*seconds, f"{100 * off:+.0f} %", *memory, f"{row['model']} {row['layout']}")
    console.print(table)
    console.print(
        f"\nstep time: median error {100 * told['time']:.1f} %, after one factor {100 * told['time_scaled']:.1f} %; "
        f"of {told['pairs']:.0f} pairs apart by over 10 %, {100 * told['ordered']:.0f} % ordered right"
    )
    console.print(
        f"memory: run dry at most {100 * told['dry']:.1f} % off, the formulas {100 * told['formula']:.1f} % (median); "
        f"load of the machine {told['load']:.1f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
