"""``python -m bench.host_step``: the optimizer step on host memory, beside a plain copy and beside its peers.

Parameters and moments are float32, gradients bf16, and the step ends with a bf16 copy of the parameters: 28 bytes a
parameter, half of them read and half of them written. The plain copy moves as many. PyTorch's fused AdamW and
DeepSpeed's CPUAdam (if it is installed) take gradients in float32 and write no copy, so theirs has a conversion before
and one after; the fused one takes the gradients' factor, the other needs them multiplied. All work on the same memory,
in turn, in one process, and ratios are medians over neighbours in time.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from bench.pairs import in_turn
from bench.realtime import permitted, scheduling
from shoal.optim.host import Update, native, plain

BYTES = 28
"""What a step has to move for each parameter."""
LR, BETAS, EPS, DECAY, FACTOR = 1e-3, (0.9, 0.95), 1e-8, 0.1, 0.75
CHECKED = 3
"""Steps after which parameters must agree; they warm everything up as well."""
COPY, SHOAL, WITHOUT, TORCH, DEEPSPEED = (
    "copy_",
    "Shoal",
    "Shoal, no compiler",
    "torch fused + cast",
    "DeepSpeed CPUAdam",
)
PAUSE_S = 0.005
"""Before each step, so that others get a turn where this process has the priority."""
TARGET = 0.8
"""Of the copy's bandwidth."""


@dataclass(frozen=True)
class Row:
    """One size with one number of threads. ``gb_per_s`` are medians, by name; ``ratios`` are bandwidths of Shoal's
    step over each other's, medians over neighbours."""

    million: float
    threads: int
    gb_per_s: dict[str, float]
    ratios: dict[str, float]
    load: float

    @property
    def met(self) -> bool:
        return self.ratios[COPY] >= TARGET and all(self.ratios.get(peer, 1) >= 1 for peer in (TORCH, DEEPSPEED))


class Memory:
    """What a step works on."""

    def __init__(self, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.grads = torch.randn(numel, generator=generator).bfloat16()
        self.start = torch.randn(numel, generator=generator)
        self.params, self.exp_avg, self.exp_avg_sq, self.grads32 = (torch.empty(numel) for _ in range(4))
        self.half = torch.empty(numel, dtype=torch.bfloat16)
        self.source, self.target = (torch.ones(numel * BYTES // 2, dtype=torch.uint8) for _ in range(2))
        self.step = 0

    def reset(self) -> None:
        """Parameters as they were, no moments."""
        self.params.copy_(self.start)
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()
        self.step = 0

    @property
    def update(self) -> Update:
        """The next one, in the terms of Shoal's step."""
        self.step += 1
        return Update(
            self.params,
            self.grads,
            self.exp_avg,
            self.exp_avg_sq,
            LR,
            BETAS,
            EPS,
            DECAY,
            self.step,
            FACTOR,
            self.half,
        )


def steps(memory: Memory) -> dict[str, Callable[[], object]]:
    """One step of each, by name."""
    found: dict[str, Callable[[], object]] = {
        COPY: lambda: memory.target.copy_(memory.source),
        SHOAL: lambda: (native() or plain)(memory.update),
        WITHOUT: lambda: plain(memory.update),
        TORCH: torch_fused(memory),
    }
    if importlib.util.find_spec("deepspeed"):
        found[DEEPSPEED] = deepspeed_adam(memory)
    return found


def torch_fused(memory: Memory) -> Callable[[], object]:
    """PyTorch's, as its optimizer calls it with gradient scaling."""
    scale, none = torch.tensor(1 / FACTOR), torch.zeros(())

    def step() -> None:
        memory.grads32.copy_(memory.grads)
        update = memory.update
        torch._fused_adamw_(
            [update.params],
            [memory.grads32],
            [update.exp_avg],
            [update.exp_avg_sq],
            [],
            [torch.tensor(float(update.step))],
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=DECAY,
            eps=EPS,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=none,
        )
        memory.half.copy_(memory.params)

    return step


def deepspeed_adam(memory: Memory) -> Callable[[], object]:
    """DeepSpeed's, as its offloaded ZeRO optimizer calls it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = nn.Parameter(memory.params)
    optimizer = DeepSpeedCPUAdam([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    parameter.grad = memory.grads32
    state = optimizer.state[parameter]
    state.update(exp_avg=memory.exp_avg, exp_avg_sq=memory.exp_avg_sq)

    def step() -> None:
        state["step"] = memory.update.step - 1
        memory.grads32.copy_(memory.grads)
        memory.grads32.mul_(FACTOR)
        optimizer.step()
        memory.half.copy_(memory.params)

    return step


def measure(million: float, threads: int, rounds: int, realtime: bool) -> Row:
    """Check that all compute the same, then time them in turn."""
    torch.set_num_threads(threads)
    memory = Memory(int(million * 1e6))
    subjects = steps(memory)
    check(memory, {name: step for name, step in subjects.items() if name != COPY})
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    gc.collect()
    with scheduling(realtime):
        for round_ in range(rounds):
            for name in in_turn(list(subjects), round_):
                time.sleep(PAUSE_S)
                start = time.perf_counter()
                subjects[name]()
                seconds[name].append(time.perf_counter() - start)
    moved = BYTES * memory.params.numel() / 1e9
    return Row(
        million,
        threads,
        {name: moved / median(took) for name, took in seconds.items()},
        {
            name: median(other / ours for other, ours in zip(took, seconds[SHOAL], strict=True))
            for name, took in seconds.items()
            if name != SHOAL
        },
        os.getloadavg()[0],
    )


def check(memory: Memory, subjects: Mapping[str, Callable[[], object]]) -> None:
    """Parameters and their copy agree with Shoal's."""
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for name, step in subjects.items():
        memory.reset()
        for _ in range(CHECKED):
            step()
        results[name] = memory.params.clone(), memory.half.clone()
        torch.testing.assert_close(results[name][0], results[SHOAL][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(results[name][1], results[SHOAL][1], rtol=2**-7, atol=1e-6)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for. Under real-time scheduling 1 when a target is missed; else there is no verdict."""
    options = _options(arguments)
    realtime = options.rt and permitted()
    cases = [(million, threads) for million in options.million for threads in options.threads]
    watched = Console(stderr=True)
    rows = [
        measure(*case, options.rounds, realtime)
        for case in track(cases, "measuring", console=watched, disable=not watched.is_terminal)
    ]
    if options.json:
        print(json.dumps({"native": native() is not None, "rows": [asdict(row) for row in rows]}))
    else:
        shown = Console()
        if not shown.is_terminal:
            shown.width = 132
        shown.print(_table(rows, realtime))
    return int(realtime and not all(row.met for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.host_step",
        description="The optimizer step on host memory, beside a plain copy of as many bytes and beside its peers.",
        epilog="example: python -m bench.host_step --million 10 --threads 1",
    )
    parser.add_argument("--million", nargs="+", type=float, default=[10, 50], metavar="N", help="parameters (10 50)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N", help="(default: 1 2)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="steps of each (default: 9)")
    parser.add_argument("--rt", action="store_true", help="real-time scheduling where it is permitted")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args(arguments)


def _table(rows: Sequence[Row], verdict: bool) -> Table:
    table = Table(
        title="The optimizer step on host memory",
        caption=f"GB/s: {BYTES} bytes a parameter, over the median; ratios: bandwidth of Shoal's step over the other's"
        f"\nat least {TARGET} of the copy's and as fast as torch's and DeepSpeed's"
        + ("" if verdict else "; without SCHED_FIFO there is no verdict"),
    )
    names = [name for name in rows[0].gb_per_s if name != SHOAL]
    for title in ("parameters", "threads", "Shoal GB/s", *(f"{name}\nGB/s (ratio)" for name in names), "load"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            f"{row.million:g} M",
            str(row.threads),
            f"{row.gb_per_s[SHOAL]:.1f}",
            *(f"{row.gb_per_s[name]:.1f} ({row.ratios[name]:.2f})" for name in names),
            f"{row.load:.1f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
