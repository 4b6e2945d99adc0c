"""``python -m bench.experts``: a layer with experts, beside the products that it must do and beside transformers.

Forward and backward of one layer in one process: a router, E experts of which a token takes k, nothing shared. The
products are those of the experts alone, k rows a token, as dense matrices have them: three in the forward pass, twice
as many in the backward pass, into memory that is there. All work on the same weights and tokens and must agree in
outputs and gradients; they take turns, and ratios are medians over neighbours in time, of seconds of the processor.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from bench.pairs import in_turn
from bench.realtime import permitted, scheduling
from shoal.comm.process import keep_freed_memory
from shoal.config import Model
from shoal.model.context import Context
from shoal.model.decoder import Decoder
from shoal.model.routed import Routed
from shoal.train.setup import materialise_alone

PRODUCTS, SHOAL = "products", "Shoal"
TARGET = 1.15
"""Of the products' seconds."""
SEQ_LEN = 256
KINDS = {"transformers": "eager", "transformers, grouped_mm": "grouped_mm"}


@dataclass(frozen=True)
class Row:
    """One size. ``cpu_s`` are medians, by name; ``ratios`` are Shoal's seconds over each other's."""

    hidden: int
    columns: int
    experts: int
    chosen: int
    tokens: int
    cpu_s: dict[str, float]
    ratios: dict[str, float]
    load: float


def layer_of(hidden: int, columns: int, experts: int, chosen: int) -> Routed:
    """Shoal's layer, as a decoder has it."""
    heads = hidden // 64
    shape = Model(
        layers=1, hidden=hidden, heads=heads, ffn=columns, vocab=8,
        experts=experts, experts_per_token=chosen, gate="topk-softmax",
    )  # fmt: skip
    with torch.device("meta"):
        model = Decoder(shape)
    materialise_alone(model, 0)
    layer = model.blocks[0].ffn
    assert isinstance(layer, Routed)
    return layer


def shoal(layer: Routed, x: Tensor) -> Callable[[], Tensor]:
    """Its forward and backward pass."""

    def step() -> Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y = layer(x, Context(None, length=x.shape[1], samples=len(x)))
        y.backward(torch.ones_like(y))
        return y.detach()

    return step


def transformers(layer: Routed, x: Tensor, kind: str) -> Callable[[], Tensor]:
    """Mixtral's layer with the weights of ``layer``."""
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    gate = layer.gate
    hidden, columns = layer.router.in_features, layer.experts.down.weight.shape[1]
    config: Any = MixtralConfig(
        hidden_size=hidden, intermediate_size=columns, num_local_experts=gate.experts, num_experts_per_tok=gate.chosen
    )
    config._experts_implementation = kind
    block: Any = MixtralSparseMoeBlock(config)
    block.gate.weight = nn.Parameter(layer.router.weight.detach())
    block.experts.gate_up_proj = nn.Parameter(layer.experts.gate_up.weight.detach().unflatten(0, (gate.experts, -1)))
    block.experts.down_proj = nn.Parameter(layer.experts.down.weight.detach().unflatten(0, (gate.experts, -1)))

    def step() -> Tensor:
        block.zero_grad(set_to_none=True)
        x.grad = None
        y: Tensor = block(x)
        y.backward(torch.ones_like(y))
        return y.detach()

    return step


def products(layer: Routed, x: Tensor) -> Callable[[], None]:
    """What dense matrices of one expert's size would do for k rows of each token."""
    rows = x.shape[0] * x.shape[1] * layer.gate.chosen
    gate_up = layer.experts.gate_up.weight.detach().unflatten(0, (layer.gate.experts, -1))[0].contiguous()
    down = layer.experts.down.weight.detach().unflatten(0, (layer.gate.experts, -1))[0].contiguous()
    x_rows, inner = torch.randn(rows, x.shape[-1]), torch.randn(rows, down.shape[1])
    wide, out = torch.empty(rows, len(gate_up)), torch.empty(rows, x.shape[-1])
    grad_gate_up, grad_down = torch.empty_like(gate_up), torch.empty_like(down)

    def step() -> None:
        torch.mm(x_rows, gate_up.t(), out=wide)
        torch.mm(inner, down.t(), out=out)
        torch.mm(out, down, out=inner)
        torch.mm(out.t(), inner, out=grad_down)
        torch.mm(wide, gate_up, out=out)
        torch.mm(wide.t(), x_rows, out=grad_gate_up)
        inner.copy_(inner.clamp_(-1, 1))

    return step


def measure(size: tuple[int, int, int, int, int], rounds: int, realtime: bool) -> Row:
    """Check that all compute the same, then time them in turn."""
    hidden, columns, experts, chosen, tokens = size
    torch.set_num_threads(1)
    keep_freed_memory()  # as in every run of Shoal
    layer = layer_of(hidden, columns, experts, chosen)
    x = torch.randn(tokens // SEQ_LEN, SEQ_LEN, hidden, requires_grad=True)
    steps: dict[str, Callable[[], object]] = {PRODUCTS: products(layer, x), SHOAL: shoal(layer, x)}
    if importlib.util.find_spec("transformers"):
        steps |= {name: transformers(layer, x, kind) for name, kind in KINDS.items()}
    check(x, {name: step for name, step in steps.items() if name != PRODUCTS})
    steps[PRODUCTS]()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    with scheduling(realtime):
        for round_ in range(rounds):
            for name in in_turn(list(steps), round_):
                start = time.process_time()
                steps[name]()
                seconds[name].append(time.process_time() - start)
    return Row(
        *size,
        {name: median(took) for name, took in seconds.items()},
        {
            name: median(ours / other for ours, other in zip(seconds[SHOAL], took, strict=True))
            for name, took in seconds.items()
            if name != SHOAL
        },
        os.getloadavg()[0],
    )


def check(x: Tensor, steps: dict[str, Callable[[], object]]) -> None:
    """Outputs and gradients of the input agree with Shoal's."""
    found: dict[str, tuple[object, Tensor | None]] = {}
    for name, step in steps.items():
        found[name] = step(), x.grad
        for ours, theirs in zip(found[SHOAL], found[name], strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for. Under real-time scheduling 1 when a target is missed; else there is no verdict."""
    options = _options(arguments)
    realtime = options.rt and permitted()
    sizes = [(*size, options.experts, options.chosen, options.tokens) for size in options.sizes]
    watched = Console(stderr=True)
    rows = [
        measure(size, options.rounds, realtime)
        for size in track(sizes, "measuring", console=watched, disable=not watched.is_terminal)
    ]
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        shown = Console()
        if not shown.is_terminal:
            shown.width = 132
        shown.print(_table(rows, realtime))
    return int(realtime and not all(row.ratios[PRODUCTS] <= TARGET for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.experts",
        description="A layer with experts, beside the products it must do and beside transformers' layer; one thread.",
        epilog="example: python -m bench.experts --tokens 4096 --sizes 512x1024",
    )
    parser.add_argument("--sizes", nargs="+", type=_size, default=[(512, 1024), (256, 512)], metavar="HxF")
    parser.add_argument("--experts", type=int, default=8, metavar="E", help="(default: 8)")
    parser.add_argument("--chosen", type=int, default=2, metavar="K", help="(default: 2)")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="(default: 4096)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="steps of each (default: 7)")
    parser.add_argument("--rt", action="store_true", help="real-time scheduling where it is permitted")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args(arguments)


def _size(text: str) -> tuple[int, int]:
    hidden, columns = text.split("x")
    return int(hidden), int(columns)


def _table(rows: Sequence[Row], verdict: bool) -> Table:
    table = Table(
        title="A layer with experts, forward and backward",
        caption=f"CPU seconds, medians; ratios: Shoal's over the other's; at most {TARGET} of the products'"
        + ("" if verdict else "; without SCHED_FIFO there is no verdict"),
    )
    names = [name for name in rows[0].cpu_s if name != SHOAL]
    for title in ("size", "E, k, tokens", "Shoal s", *(f"{name} s\n(ratio)" for name in names), "load"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            f"{row.hidden}x{row.columns}",
            f"{row.experts}, {row.chosen}, {row.tokens}",
            f"{row.cpu_s[SHOAL]:.3f}",
            *(f"{row.cpu_s[name]:.3f} ({row.ratios[name]:.2f})" for name in names),
            f"{row.load:.1f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
