"""Published runs as jobs and splits.

What a row does not print is filled in from what its source says of its machines and software, or it is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.layout.kinds import SCHEDULES
from shoal.plan import hardware, shape
from shoal.plan.memory import Memory
from shoal.plan.profile import PROFILES
from shoal.plan.work import Job, Split

# Devices of a node and Gbit/s of network a device, as the sources describe their machines.
_MACHINES = {
    "BLOOM": (8, 50),  # Jean Zay: four Omni-Path links of 100 Gbit/s
    "BLOOM-prequel": (8, 50),
    "bigscience-V100": (4, 100),
    "InternEvo": (8, 50),  # four RoCE cards of 100 Gbit/s
    "PyTorchFSDP": (8, 200),
    "fms-fsdp": (8, 100),
}
_DEVICES = {
    "A100-80GB": "a100",
    "A100-40GB": "a100-40",
    "A100": "a100",
    "A800-80GB": "a100",
    "H100-80GB": "h100",
    "H100": "h100",
    "H100-96GB-HBM2e-500W": "h100-500w",
    "H800": "h800",
    "H200-141GB": "h200",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "V100-32GB": "v100",
}


@dataclass(frozen=True)
class Row:
    """A published run: what ran, and how long a step took."""

    group: str
    grid: str
    """Rows of one source, model and machine: a set that is held out together."""
    job: Job
    split: Split
    seconds: float
    """Of a step."""
    name: str


def read(path: Path) -> tuple[list[Row], dict[str, int]]:
    """The rows that say enough, and how many do not, by reason."""
    rows: list[Row] = []
    left: dict[str, int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        table = json.loads(line)
        row = of(table)
        if isinstance(row, str):
            left[row] = left.get(row, 0) + 1
        else:
            rows.append(row)
    return rows, left


def of(table: dict[str, Any]) -> Row | str:
    """One row, or why it is left out."""
    model = table["model"]
    if table["task"] != "pretrain":
        return "not pretraining"
    if table["gpu"] not in _DEVICES:
        return "no such device"
    if model["name"].startswith(("Nemotron-H", "Nemotron_3", "Nemotron_3")):
        return "not a transformer"
    for key in ("layers", "hidden", "heads", "seq"):
        if not model.get(key):
            return "model not printed"
    if not model.get("vocab"):
        return "vocabulary not printed"
    ranks, tp, pp, batch = (table[key] for key in ("n_gpus", "tp", "pp", "global_batch"))
    if not (ranks and tp and pp and table["dp"]):
        return "layout not printed"
    cp = table["cp"] or 1
    dp = ranks // (tp * pp * cp)
    if dp * tp * pp * cp != ranks:
        return "layout does not multiply to its GPUs"
    samples = table["micro_batch"]
    if not samples:
        return "micro-batch not printed"
    batch = batch or dp * samples
    if batch % (dp * samples):
        return "batch does not divide"
    count = batch // (dp * samples)
    kind = profile_of(table)
    chunks = table["interleave"] or (1 if pp == 1 else _chunks(table, kind))
    schedule = "interleaved" if chunks > 1 and pp > 1 else "1f1b"
    if pp == 1:
        chunks = 1
    if schedule == "interleaved" and count % pp:
        return "interleaving does not divide"
    if pp * chunks > model["layers"]:
        chunks = model["layers"] // pp
    if pp > model["layers"]:
        return "more stages than layers"
    zero = table["zero"]
    shard, extra = 0, table.get("extra") or {}
    if zero == "HSDP":
        zero, shard = 3, 8
    group = extra.get("zero1_group") or extra.get("fsdp_group")
    if isinstance(group, int) and group < dp * cp:
        shard = group
    experts = model.get("experts") or 0
    ep = table["ep"] or 1
    etp = 1
    if experts:
        folded = table["group"] in ("Megatron-Bridge", "dgxc-v25.05.02")
        etp = 1 if folded else tp
        if dp * cp * tp % (ep * etp):
            etp = 1
    recompute = {"full": "full", "selective": "selective", "selective-op": "none"}.get(table["recompute"] or "", "none")
    # NVIDIA's recipes for speed recompute nothing unless they say so.
    unknown = table["recompute"] is None and not kind.startswith(("nemo", "bridge"))
    sequence = bool(table["sequence_parallel"]) if table["sequence_parallel"] is not None else tp > 1
    split = Split(
        dp, tp, pp, cp, ep, etp, int(zero or 0), shard, sequence and tp > 1, schedule, chunks, samples, count, recompute
    )
    per_node, gbit = _MACHINES.get(table["group"], (None, None))
    device = hardware.DEVICES[_DEVICES[table["gpu"]]]
    per_node = min(per_node or device.per_node, ranks)
    nic = gbit / 8 if gbit else device.nic
    cluster = hardware.Cluster(table["gpu"], device, -(-ranks // per_node), per_node, nic)
    job = Job(shape_of(model), cluster, model["seq"], batch, PROFILES[kind], table["precision"] or "bf16")
    if unknown:
        split = lightest(Memory(job), split)
    seconds = _seconds(table, job)
    if not seconds:
        return "no time printed"
    grid = f"{table['group']}/{model['name']}/{model['seq']}/{table['gpu']}"
    name = f"{model['name']} n{ranks} {table['precision']} {split}"
    return Row(table["group"], grid, job, split, seconds, name)


def lightest(memory: Memory, split: Split) -> Split:
    """What recomputes least and fits, where a source does not print what it recomputed."""
    options = [split._replace(recompute=recompute) for recompute in ("none", "selective", "full")]
    return next((option for option in options if memory.most(option).total <= memory.room), options[-1])


def shape_of(model: dict[str, Any]) -> shape.Shape:
    """The shape, with what is common knowledge of its name: latent attention, shared experts, dense layers."""
    known = dict(model)
    name = model["name"]
    if name.startswith("DeepSeek-V3"):
        known |= {"latent": shape.Latent(1536, 512, 64), "head_dim": 128, "kv_heads": model["heads"]}
        known |= {"dense_layers": 3, "shared_ffn": 2048, "moe_ffn": 2048, "dense_ffn": 18432}
    elif name.startswith("Llama 4 Maverick"):
        known |= {"dense_layers": model["layers"] // 2, "shared_ffn": 8192, "moe_ffn": 8192, "dense_ffn": 16384}
    return shape.of_table(name, known)


def profile_of(table: dict[str, Any]) -> str:
    """The framework's profile: its version and kernels."""
    framework, group = table["framework"], table["group"]
    kernel = (table.get("extra") or {}).get("kernel")
    if framework.startswith("Aleph"):
        return {
            "torch": "scaling-torch",
            "fused": "scaling-fused",
            "flash_attentionv1.0.8": "scaling-flash1",
            "flash_attention2": "scaling-flash2",
        }.get(kernel or "", "scaling-flash2-norm")
    if framework.startswith("Composer"):
        return "composer"
    if framework.startswith("torchtitan"):
        return "torchtitan" if "eager" in (table["note"] or "") else "torchtitan-compiled"
    if framework.startswith("PyTorch FSDP"):
        return "fsdp-compiled"
    if framework.startswith("Megatron-LM") or framework == "Megatron-LM PTD-P":
        return {"Korthikanti2022": "megatron-2022", "Narayanan2021": "megatron-2021"}.get(group, "megatron-deepspeed")
    if framework.startswith(("Megatron-DeepSpeed", "Megatron + DeepSpeed")):
        return "megatron-deepspeed"
    if framework == "InternEvo":
        return "internevo"
    if framework.startswith("NeMo"):
        return "nemo"
    if framework.startswith("Megatron-Bridge"):
        return "bridge-2602" if "[26.02" in table["source"] or "[26.04" in table["source"] else "bridge"
    return "deepspeed" if "DeepSpeed" in framework else "megatron"


def _chunks(table: dict[str, Any], kind: str) -> int:
    """Not printed. The papers of 2021 and 2022 say that they interleave, but not with how many stages a rank: two are
    assumed, where layers and micro-batches allow it."""
    layers, pp = table["model"]["layers"], table["pp"]
    count = (table["global_batch"] or 0) // (table["dp"] * table["micro_batch"])
    if kind in ("nemo", "bridge", "bridge-2602"):
        # Their recipes interleave as finely as layers allow.
        fine = [v for v in range(layers // pp, 0, -1) if layers % (v * pp) == 0]
        return next((v for v in fine if SCHEDULES["interleaved"].admits(pp, count)), 1)
    if kind == "megatron-2021" and layers % (2 * pp) == 0 and SCHEDULES["interleaved"].admits(pp, count):
        return 2
    return 1


def _seconds(table: dict[str, Any], job: Job) -> float | None:
    result, seq = table["result"], job.seq
    if result["step_time_s"]:
        return float(result["step_time_s"])
    ranks, batch = table["n_gpus"], job.batch
    if result["tokens_per_s_gpu"]:
        return batch * seq / (result["tokens_per_s_gpu"] * ranks)
    if result["samples_per_s_gpu"]:
        return batch / (result["samples_per_s_gpu"] * ranks)
    flops = job.shape.flops(seq) * batch * seq
    if result["mfu"]:
        return flops / (result["mfu"] * job.cluster.device.peak * 1e12 * ranks)
    if result["tflops_per_gpu"]:
        counted = 4 / 3 if table["recompute"] == "full" else 1.0
        return flops * counted / (result["tflops_per_gpu"] * 1e12 * ranks)
    return None


def grids(rows: list[Row]) -> dict[str, list[Row]]:
    """Sets of five or more configurations of one model on as many devices, each the same otherwise."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        shape = row.job.shape
        sizes = f"{shape.layers}x{shape.hidden}x{shape.heads}"
        name = f"{row.grid}/{sizes}/{row.split.ranks}/{row.job.precision}/{row.job.batch}"
        found.setdefault(name, []).append(row)
    return {name: members for name, members in found.items() if len({row.split for row in members}) >= 5}


def tagged(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """Each row with its set."""
    return ((row.grid, row) for row in rows)


def changed(row: Row, **changes: Any) -> Row:
    """A row with another split."""
    return replace(row, split=row.split._replace(**changes))
