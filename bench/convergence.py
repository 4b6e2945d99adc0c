"""``python -m bench.convergence``: whether pipelines without a flush train as well as 1F1B.

A small decoder is trained on the repository's text, as ``shoal train`` does it, under each schedule with the same
learning rates and seeds; a seed is that of the weights, of the order of samples and of what is kept for validation.
Each layout is judged by the mean over seeds of its last validation loss, at the rate that is best for it, beside that
of 1F1B. Pipelines are drained before validation.

What is equal: the samples and their order, the number of updates and the samples of each, and with them warm-up and
decay in tokens. Under PipeDream a micro-batch is an update, so a step has one, beside the P of the others (what 1F1B
and 2BW compute does not depend on how many there are). What differs is the age of the gradients, and PipeDream's
clipping, each stage by its own norm. The other way to compare, equal micro-batches, gives PipeDream more updates, each
of fewer samples; where samples are few that is an advantage, which hides what old gradients cost, and which 1F1B with
as small a batch has too.

Blocks have a tenth of the learning rate of embedding and output matrix, because so narrow a model learns much faster
with less for them. With three tenths 1F1B learns as well as with one, and old gradients cost more than here
(docs/pipeline.md has the numbers): it is rates at which 1F1B is close to unstable that they do not bear. No layout has
a rate of its own, as PipeDream's paper has none, but the one of the sweep that is best for it. Rates are a factor of
three apart, and a best one at an end of the sweep is marked: a better one may lie beyond.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, isfinite
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.progress import track
from rich.table import Table

from shoal.config import Config, load
from shoal.errors import Diverged, ShoalError
from shoal.layout import Layout
from shoal.report.progress import progress
from shoal.train.loop import train
from shoal.train.pool import Pool
from shoal.train.prepare import prepare_data
from shoal.train.setup import fit

RUN = Path("runs/quickstart.toml")
"""Where the text is from, its tokens, and the share that is kept for validation."""
SMALLER = (
    "model.hidden=64",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn=176",
    "model.tied=false",  # PipeDream's two copies of a tied embedding would drift apart
    "data.seq_len=64",
    "data.batch=4",
    'optimizer.groups=[{match="blocks.*", lr=0.1}]',
    "evaluation.every=0",
    "evaluation.batches=128",
    "checkpoint.every=0",
    'run.sample=""',
)
STEPS = 800
RATES = (3e-3, 1e-2, 3e-2)
SEEDS = (0, 1, 2)
MOST = 1.01
"""Of 1F1B's validation loss, what another schedule's may be."""
FALL = 2.0
"""Nats by which 1F1B's validation loss must lie below its first training loss."""


@dataclass(frozen=True)
class Trained:
    """One run: the training loss of its first step, and the validation loss after its last; nats a token."""

    first: float
    final: float


@dataclass(frozen=True)
class Row:
    """A layout with one learning rate; a run a seed."""

    layout: str
    lr: float
    runs: tuple[Trained, ...]

    @property
    def mean(self) -> float:
        return mean(run.final for run in self.runs)

    @property
    def fall(self) -> float:
        return mean(run.first - run.final for run in self.runs)


def layouts(ranks: int) -> tuple[str, ...]:
    """What is compared; 1F1B, with which, comes first."""
    return f"pp={ranks}:1f1b,mb={ranks}", f"pp={ranks}:2bw,mb={ranks}", f"pp={ranks}:pipedream,mb=1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the table. 1 when a schedule's loss is too high, or 1F1B has learnt too little to tell."""
    options = _options(arguments)
    rates, seeds = (RATES[1:2], SEEDS[:1]) if options.quick else (RATES, SEEDS)
    watched = Console(stderr=True)
    try:
        with progress(watched) as shown:
            prepare_data(config(Path(), RATES[0], SEEDS[0], options.steps), shown)
        with Pool(options.ranks) as pool:
            asked = list(product(layouts(options.ranks), rates, seeds))
            todo = track(asked, "training", console=watched, disable=not watched.is_terminal)
            runs = {(layout, lr, seed): trained(pool, layout, lr, seed, options.steps) for layout, lr, seed in todo}
    except ShoalError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    rows = [
        Row(layout, lr, tuple(runs[layout, lr, seed] for seed in seeds))
        for layout, lr in product(layouts(options.ranks), rates)
    ]
    best = choose(rows)
    wrong = faults(best)
    if options.json:
        print(json.dumps({"steps": options.steps, "rows": [_values(row, best) for row in rows], "faults": wrong}))
    else:
        Console().print(_table(rows, best, seeds))
        print("\n".join(wrong) or f"all within {MOST - 1:.0%} of {next(iter(best))}, whose loss fell far enough")
    return int(bool(wrong))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.convergence",
        description="Whether PipeDream and 2BW train as well as 1F1B: validation losses over seeds and learning rates.",
        epilog="example: python -m bench.convergence --ranks 4",
    )
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4), help="of the pipeline (default: 2)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of a run (default: {STEPS})")
    parser.add_argument("--quick", action="store_true", help="one learning rate and one seed")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args(arguments)


def config(folder: Path, lr: float, seed: int, steps: int) -> Config:
    """The run file of one run, which goes to ``folder``."""
    run = (f"run.folder={json.dumps(str(folder))}", f"run.steps={steps}", f"run.seed={seed}")
    return load(RUN, (*SMALLER, *run, f"optimizer.lr={lr}", f"schedule.warmup={steps // 10}"))


def trained(pool: Pool, layout: str, lr: float, seed: int, steps: int) -> Trained:
    """Train once, on as many ranks as the pool has. A run that diverges ends with an infinite loss."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        run = config(Path(folder), lr, seed, steps)
        try:
            ends = pool.run(train, run, fit(run, Layout.parse(layout), pool.size), tuple)  # tuple(): nobody watches
            final = ends[0]["validation_loss"]
        except Diverged:
            final = inf
        return Trained(_first_loss(Path(folder) / run.run.name / "metrics.jsonl"), final)


def _first_loss(metrics: Path) -> float:
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return next(float(line["loss"]) for line in lines if line["event"] == "step")


def choose(rows: Sequence[Row]) -> dict[str, Row]:
    """The row of each layout whose mean loss is lowest."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.layout not in best or row.mean < best[row.layout].mean:
            best[row.layout] = row
    return best


def faults(best: Mapping[str, Row]) -> list[str]:
    """What is not as it should be, a line each; the first of ``best`` is what the others are compared with."""
    base, *others = best.values()
    found = []
    if not base.fall >= FALL:
        found.append(f"{base.layout}: its loss fell by {base.fall:.2f} nats, which is less than {FALL}")
    for row in others:
        if not row.mean <= MOST * base.mean:
            found.append(f"{row.layout}: {row.mean / base.mean:.4f} of {base.layout}'s loss, more than {MOST}")
    return found


def _at_an_end(row: Row, rows: Sequence[Row]) -> bool:
    rates = [one.lr for one in rows if one.layout == row.layout]
    return row.lr in (min(rates), max(rates))


def _values(row: Row, best: Mapping[str, Row]) -> dict[str, object]:
    base = next(iter(best.values()))
    return {
        "layout": row.layout,
        "lr": row.lr,
        "losses": [_finite(run.final) for run in row.runs],
        "mean": _finite(row.mean),
        "ratio": _finite(row.mean / base.mean),
        "fall": _finite(row.fall),
        "best": row is best[row.layout],
    }


def _finite(x: float) -> float | None:
    """JSON has no other numbers."""
    return x if isfinite(x) else None


def _table(rows: Sequence[Row], best: Mapping[str, Row], seeds: Sequence[int]) -> Table:
    base = next(iter(best.values()))
    table = Table(
        title="Validation loss after equal tokens, nats a token",
        caption=f"ratio: of a layout's lowest mean to {base.layout}'s, whose loss fell by {base.fall:.2f} nats\n"
        "* lowest at an end of the sweep",
    )
    table.add_column("layout")
    for name in ("rate", *(f"seed {seed}" for seed in seeds), "mean", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        chosen = row is best[row.layout]
        mark = "*" if chosen and _at_an_end(row, rows) else ""
        table.add_row(
            row.layout,
            f"{row.lr:g}{mark}",
            *(f"{run.final:.3f}" for run in row.runs),
            f"{row.mean:.3f}",
            f"{row.mean / base.mean:.4f}" if chosen else "",
            style="bold" if chosen else "dim",
            end_section=row.lr == rows[-1].lr,
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
