"""``make gpu-check``: whether Shoal is right and how fast it is on the GPU at hand; in under six minutes.

Right: the loss and the gradient norm of three steps, beside float32 on the CPU, for one rank and for four ranks that
share the first GPU. Fast: tokens per second of a model of a billion parameters in bf16, and the share of the GPU's
peak that its matrix products are (MFU, Chowdhery et al. 2022: 6 operations a parameter and token, and 6·L·H·T a token
for causal attention; nothing is recomputed).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from shoal.comm.world import World
from shoal.config import Config, Model, load, parse
from shoal.layout import Layout
from shoal.train.pool import Pool
from shoal.train.setup import make_engine, open_data

TINY = Path(__file__).parents[1] / "runs" / "tiny.toml"
STEPS = 3
TOLERANCE = {"float32": 1e-4, "bf16": 2e-2}
"""Largest relative differences from the CPU; matrix products on a GPU add up in another order."""
LINES = ("dp=1,mb=2", "dp=4", "dp=2,zero=3,tp=2", "tp=4:1d-sp", "pp=4:1f1b,mb=4", "dp=2,pp=2:1f1b,zero=1,mb=2")

BILLION = Model(layers=16, hidden=2048, heads=16, kv_heads=8, ffn=8192, vocab=32_000)
SAMPLES, SEQ_LEN, TIMED = 4, 2048, 10
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "V100": 125e12}
"""Dense bf16 (fp16 on V100) operations per second with float32 accumulation, from the makers' data sheets."""


@dataclass(frozen=True)
class Speed:
    """Of the large model on one GPU."""

    name: str
    parameters: int
    tokens_per_s: float
    memory_gib: float

    @property
    def mfu(self) -> float | None:
        """None where the peak of the GPU is not known."""
        peak = next((peak for name, peak in PEAKS.items() if name in self.name), None)
        multiplied = self.parameters - BILLION.vocab * BILLION.hidden  # the input table is only looked up
        attention = 6 * BILLION.layers * BILLION.hidden * SEQ_LEN
        return None if peak is None else self.tokens_per_s * (6 * multiplied + attention) / peak


def main() -> int:
    """0 when everything agrees or there is no GPU; 1 when something does not agree."""
    console = Console()
    if not torch.cuda.device_count():
        console.print("There is no GPU here: nothing was checked.")
        return 0
    with Pool(4, threads=1) as pool:
        config = load(TINY, ["model.dropout=0"])
        (truth,) = pool.run(few_steps, config, "dtype=float32", ranks=1)
        table = Table(title="Beside float32 on the CPU, largest relative difference")
        for name in ("layout", "loss", "gradient norm", ""):
            table.add_column(name)
        agree = True
        for dtype, tolerance in TOLERANCE.items():
            for line in LINES:
                layout = Layout.parse(f"{line},dtype={dtype}")
                found = pool.run(few_steps, config, str(layout), ranks=layout.ranks, device="cuda:0")[0]
                loss, norm = (_worst([one[at] for one in found], [one[at] for one in truth]) for at in (0, 1))
                right = loss <= tolerance and norm <= 10 * tolerance
                agree &= right
                table.add_row(str(layout), f"{loss:.1e}", f"{norm:.1e}", "agrees" if right else "DIFFERS")
        console.print(table)
        (speed,) = pool.run(time_steps, ranks=1, device="cuda:0")
    mfu = "n/a" if speed.mfu is None else f"{speed.mfu:.1%}"
    console.print(
        f"{speed.parameters / 1e9:.2f} B parameters in bf16 on one {speed.name}: {speed.tokens_per_s:,.0f} tokens/s, "
        f"MFU {mfu}, at most {speed.memory_gib:.1f} GiB"
    )
    return 0 if agree else 1


def few_steps(world: World, config: Config, line: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first steps."""
    engine = make_engine(config, Layout.parse(line), world)
    source, part = open_data(config), engine.mesh.coords["dp"]
    results = [engine.step(source.batch(step, part, engine.layout.dp)) for step in range(STEPS)]
    return [(one.loss, one.grad_norm) for one in results]


def time_steps(world: World) -> Speed:
    """The large model, on random tokens."""
    config = parse(
        {
            "run": {"steps": TIMED},
            "model": BILLION.model_dump(exclude_none=True),
            "data": {"source": "synthetic", "seq_len": SEQ_LEN, "batch": SAMPLES},
        }
    )
    torch.cuda.reset_peak_memory_stats(world.device)
    engine = make_engine(config, Layout.parse("dtype=bf16,mb=2"), world)
    source, seconds = open_data(config), []
    for step in range(TIMED):
        batch = source.batch(step)
        torch.cuda.synchronize()
        started = time.perf_counter()
        engine.step(batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return Speed(
        torch.cuda.get_device_name(world.device),
        sum(p.numel() for p in engine.task.module.parameters()),
        SAMPLES * SEQ_LEN / median(seconds[3:]),
        torch.cuda.max_memory_allocated(world.device) / 2**30,
    )


def _worst(found: Sequence[float], truth: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, truth, strict=True))


if __name__ == "__main__":
    sys.exit(main())
