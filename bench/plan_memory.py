"""How far the planner's memory is off: fit or out of memory, bytes that were read, and what papers print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from bench import plan_rows
from bench.plan_rows import Row
from shoal.plan import hardware, shape
from shoal.plan.memory import GIB, MARGIN, Memory, saved, states
from shoal.plan.profile import PROFILES
from shoal.plan.work import Job, Split

_UNLIKE = ("fsdp", "fp8", "grpo", "mtp", "muon", "mla", "frozen", "release", "instances", "offloading", "modelopt")
_UNLIKE += ("reruns", "recompute", "1node", "a2a_ovlp", "uneven", "zp_z3", "throughput", "defer", "resume_check")


def report(folder: Path, rows: list[Row]) -> None:
    """Prints the lines about memory."""
    tables = [json.loads(line) for line in (folder / "published_memory.jsonl").read_text(encoding="utf-8").splitlines()]
    print("\nmemory")
    fit_or_not(tables, rows)
    exact_bytes(tables)
    zero_table(tables)
    korthikanti(tables)


def fit_or_not(tables: list[dict[str, Any]], rows: list[Row]) -> None:
    """Runs that ended in out-of-memory, and those of the same sweeps that did not."""
    fitted = [row for row in rows if row.group in ("AlephAlpha", "BLOOM-prequel")]
    failed = [row for table in tables if table["kind"] == "OOM observation" and (row := _row(table))]
    said = np.array([Memory(row.job).most(row.split).total / GIB for row in (*fitted, *failed)])
    oom = np.array([False] * len(fitted) + [True] * len(failed))
    room = np.array([row.job.cluster.device.memory_gib for row in (*fitted, *failed)]) * (1 - MARGIN)
    best = max((np.mean((said > limit) == oom), limit) for limit in np.unique(said))
    false_fits = np.mean(oom & (said <= room))
    print(
        f"  fit or out of memory, {len(fitted)} + {len(failed)} runs: {100 * best[0]:.1f}% right at the best ", end=""
    )
    print(
        f"threshold ({best[1]:.1f} GiB); at the shipped margin {100 * np.mean((said > room) == oom):.1f}% right, ",
        end="",
    )
    print(f"{100 * false_fits:.1f}% said to fit that did not ({100 * false_fits / np.mean(oom):.1f}% of these)")


def _row(table: dict[str, Any]) -> Row | None:
    config, model = table["config"], table["model"]
    if not model.get("layers"):
        return None
    whole = {
        **{key: config.get(key) for key in ("tp", "pp", "dp", "zero", "micro_batch", "global_batch", "recompute")},
        **{"group": table["group"].removesuffix("-OOM"), "task": "pretrain", "model": model, "gpu": table["gpu"]},
        **{"n_gpus": table["n_gpus"], "cp": 1, "ep": 1, "interleave": 1, "precision": config.get("precision", "fp16")},
        **{"sequence_parallel": config.get("sequence_parallel", False), "note": "", "source": ""},
        "extra": {"kernel": config.get("attention_kernel")},
        "framework": "Aleph" if table["group"].startswith("Aleph") else "Megatron-DeepSpeed",
        "result": {"step_time_s": 1.0},
    }
    row = plan_rows.of(whole)
    return row if isinstance(row, Row) else None


def exact_bytes(tables: list[dict[str, Any]]) -> None:
    """Megatron's own tests print what is allocated between steps: model states, and workspaces."""
    errors: dict[str, list[float]] = {"gpt": [], "moe": []}
    for table in tables:
        if table["kind"] != "CI golden values":
            continue
        test = table["source"].split("test_cases/")[1]
        kind = test.split("/")[0]
        args, real = table["config"]["args"], table["values"]["allocated_bytes_last"]
        if kind not in errors or not real or any(word in test for word in _UNLIKE) or "h100" not in test:
            continue
        if said := _states(args, table["n_gpus"]):
            errors[kind].append(said / real - 1)
    for kind, found in errors.items():
        off = np.abs(found)
        print(f"  exact bytes, {len(found)} rows of Megatron's {kind} tests: {100 * np.mean(off):.1f}% off, ", end="")
        print(f"at most {100 * np.max(off):.1f}%, {np.sum(off <= 0.03)} within 3%")


def _states(args: dict[str, Any], ranks: int) -> float | None:
    """Bytes of the last rank, which is the one that prints."""

    def arg(name: str, default: Any = None) -> Any:
        return args.get(name) or default

    tp, pp, cp = (arg(f"{kind}-parallel-size", 1) for kind in ("tensor-model", "pipeline-model", "context"))
    ep = arg("expert-model-parallel-size", 1)
    dp = ranks // (tp * pp * cp)
    if dp == 0 or arg("mtp-num-layers"):
        return None
    # The tokenizer's vocabulary, padded.
    vocab = ceil(arg("vocab-size", 50257) / (128 * tp)) * 128 * tp
    layers, hidden = args["num-layers"], args["hidden-size"]
    table = {
        **{"layers": layers, "hidden": hidden, "heads": args["num-attention-heads"], "vocab": vocab},
        **{"kv_heads": arg("num-query-groups"), "head_dim": arg("kv-channels"), "gated_mlp": arg("swiglu", False)},
        **{"ffn": arg("ffn-hidden-size"), "experts": arg("num-experts"), "topk": arg("moe-router-topk")},
        "moe_ffn": arg("moe-ffn-hidden-size"),
    }
    if arg("swiglu") and not arg("ffn-hidden-size"):
        table["ffn"] = 4 * hidden * 2 // 3 // 64 * 64
    rope = args.get("position-embedding-type") == "rope"
    of = shape.of_table("golden", table)
    if not rope:
        of = shape.Shape(of.name, of.blocks, of.vocab, learned_positions=args["seq-length"])
    if pp == 1 and not arg("untie-embeddings-and-output-weights"):
        of = shape.Shape(of.name, of.blocks, of.vocab, True, learned_positions=of.learned_positions)
    device = hardware.DEVICES["h100"]
    cluster = hardware.Cluster("dgx", device, 1, ranks, device.nic)
    job = Job(of, cluster, args["seq-length"], 1, PROFILES["megatron"], "bf16")
    split = Split(
        dp, tp, pp, cp, ep, arg("expert-tensor-parallel-size", tp), int(bool(arg("use-distributed-optimizer")))
    )
    held = Memory(job).ranks(split)[-1]
    # Transformer Engine multiplies groups of experts on four streams, which have a workspace each.
    workspaces = 1 + (arg("num-experts", 0) // ep > 2) * (4 / 3)
    return held.parameters + held.gradients + held.optimizer + workspaces * PROFILES["megatron"].workspace_gib * GIB


def zero_table(tables: list[dict[str, Any]]) -> None:
    """Model states of the ZeRO paper, to as many digits as it prints."""
    right, count = 0, 0
    for table in tables:
        if table["group"] != "ZeRO-Table1":
            continue
        zero, ranks = table["config"]["zero"], table["config"]["dp"]
        gb = sum(states(table["model"]["params"], zero, ranks)) / 1e9
        printed = table["values"]["gb"]
        digits = len(str(printed).partition(".")[2])
        # The paper rounds to a tenth, and drops what is behind the point of large numbers.
        near = abs(gb - printed) <= 0.5 * 10**-digits + 1e-9 or (digits == 0 and int(gb) == printed)
        right, count = right + near, count + 1
        if not near:
            print(f"    {table['model']['name']} zero={zero} dp={ranks}: {gb:.3f} GB, printed {printed}")
    print(f"  ZeRO's Table 1: {right} of {count} values to the printed digits")


def korthikanti(tables: list[dict[str, Any]]) -> None:
    """Activations of Korthikanti et al.: the formulas of Table 2, and what Figures 1 and 7 make of them."""
    worst = max(abs(ours / theirs - 1) for ours, theirs in _formulas())
    print(f"  activation formulas of Korthikanti et al.: at most {100 * worst:.2f}% off")
    off = []
    for table in tables:
        if table["group"] == "Korthikanti2022" and "activations_none_gib" in table["values"]:
            none, selective = _first_stage(table)
            values = table["values"]
            off += [none / values["activations_none_gib"] - 1]
            off += [selective / values["activations_seq_par_plus_selective_gib"] - 1]
    print(f"  its models' first stages (Figures 1 and 7): at most {100 * max(map(abs, off)):.1f}% off")


def _formulas() -> Iterator[tuple[float, float]]:
    """(ours, theirs), bytes of a layer."""
    for hidden, heads, seq, samples, t in ((6144, 64, 2048, 4, 8), (12288, 96, 2048, 1, 8), (20480, 128, 2048, 1, 8)):
        layer = shape.Layer(hidden, heads, heads, hidden // heads, 4 * hidden, False)
        one = saved(layer, fused=False, dropout=True)
        sbh, scores = seq * samples * hidden, 5 * heads * seq / hidden
        tokens = seq * samples
        yield tokens * (one.outer + one.inner + one.scores * seq), sbh * (34 + scores)
        yield tokens * (one.outer + (one.inner + one.scores * seq) / t), sbh * (10 + 24 / t + scores / t)
        yield tokens * (one.outer + one.inner + one.scores * seq) / t, sbh / t * (34 + scores)
        yield tokens * (one.outer + one.inner / t), sbh * (10 + 24 / t)
        yield tokens * (one.outer + one.inner) / t, sbh / t * 34


def _first_stage(table: dict[str, Any]) -> tuple[float, float]:
    """GiB of the first stage's layers, without anything and with sequence parallelism and selective recomputation."""
    model, config = table["model"], table["config"]
    device = hardware.DEVICES["a100"]
    cluster = hardware.Cluster("selene", device, ceil(table["n_gpus"] / 8), 8, device.nic)
    of = shape.of_table(model["name"], model)
    job = Job(of, cluster, model["seq"], config["global_batch"], PROFILES["megatron-2022"], "fp16")
    chunks = config["interleave"] or 1
    base = Split(
        config["dp"],
        config["tp"],
        config["pp"],
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        samples=config["micro_batch"],
        micro_batches=config["global_batch"] // config["micro_batch"],
    )
    both = base, base._replace(sequence=True, recompute="selective")
    none, selective = (Memory(job).ranks(split)[0].activations / GIB for split in both)
    return none, selective
