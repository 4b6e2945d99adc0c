"""From a checkpoint to a folder that Hugging Face's transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal import checkpoint
from shoal.checkpoint.hf import split
from shoal.checkpoint.shards import write_shard
from shoal.checkpoint.whole import WholeTensors
from shoal.config import parse
from shoal.data.tokenize import load_tokenizer, own_ends
from shoal.errors import CheckpointError, ConfigError, nearest, setting
from shoal.model.hf import (
    CONFIG,
    FAMILIES,
    GENERATION,
    INDEX,
    TOKENIZER_CONFIG,
    WEIGHTS,
    Stored,
    logical_shapes,
    read_json,
    stored_tensors,
    write_config,
)
from shoal.train.folder import COMPANIONS, TOKENIZER, check_absent, made_whole
from shoal.train.prepare import Progress

SHARD_BYTES = 5 * 10**9
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Exported:
    """What an export has made, at ``out``, of which checkpoint."""

    out: Path
    checkpoint: Path
    family: str
    dtype: str
    files: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "out": str(self.out), "checkpoint": str(self.checkpoint)}

    def told(self) -> str:
        """What there is now, and what to do next."""
        count = f"{len(self.files)} files" if len(self.files) > 1 else self.files[0]
        return (
            f"{self.out}: {self.checkpoint} as {FAMILIES[self.family].architecture}, {self.dtype}, in {count}\n"
            f'next: transformers.AutoModelForCausalLM.from_pretrained("{self.out}")'
        )


def export_hf(
    path: Path, out: Path, progress: Progress, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Write the weights of a checkpoint, or of a run's newest, as a new Hugging Face folder ``out``.

    ``dtype`` (a name that torch has) is that of all weights but the biases of gates, which stay exact; unset, each
    stays as it is stored. Files hold at most ``shard_bytes``, or one tensor. Raises, before anything is written,
    :class:`~shoal.errors.ConfigError` where ``out`` exists or no family has such a model, and
    :class:`~shoal.errors.CheckpointError` where the checkpoint is damaged.
    """
    check_absent(out)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(
            setting("--dtype", dtype, f"not known{nearest(dtype, DTYPES)}", f"one of {', '.join(DTYPES)}")
        )
    found = checkpoint.resolve(path)
    meta: Any = checkpoint.read_manifest(found).meta
    if "config" not in meta:
        problem = "it does not say which model it is of"
        raise CheckpointError(setting("checkpoint", found, problem, "name one of shoal train or shoal import"))
    config, beside = parse(meta["config"]), found.parent / COMPANIONS
    base = read_json(beside / CONFIG) if (beside / CONFIG).is_file() else _ends(found.parent)
    written = write_config(config.model, base, positions=config.data.seq_len)
    manifest = checkpoint.verify(found, partial(progress, f"checking {found}"))
    weights, shapes = WholeTensors(found, manifest), logical_shapes(config.model)
    assert weights.shapes == shapes, "a checkpoint is of the model that it names"
    family = FAMILIES[written["model_type"]]
    stored = {one.name: one for one in stored_tensors(family, shapes, config.model)}
    main = dtype or _main_dtype(weights)
    written.pop("dtype", None)
    with made_whole(out) as aside:
        files = _write_weights(aside, weights, stored, dtype, shard_bytes, partial(progress, f"exporting to {out}"))
        _write_json(aside / CONFIG, {**written, "torch_dtype": main})
        _write_companions(found.parent, aside, base)
    return Exported(out, found, family.name, main, tuple(files))


def _write_weights(
    folder: Path, weights: WholeTensors, stored: Mapping[str, Stored], dtype: str | None, most: int, progress: Any
) -> list[str]:
    """Write the tensors, in one file or in several and an index; returns the files' names."""
    announced = {name: _announced(weights, one, dtype) for name, one in stored.items()}
    sizes = {name: tensor.nbytes for name, tensor in announced.items()}
    groups = list(split(sizes, most))
    total, done = sum(sizes.values()), 0
    where: dict[str, str] = {}

    def fetch(name: str) -> Tensor:
        nonlocal done
        progress(done, total)
        done += sizes[name]
        return _read(weights, stored[name]).to(announced[name].dtype)

    names = [f"model-{at:05d}-of-{len(groups):05d}.safetensors" for at in range(1, len(groups) + 1)]
    names = [WEIGHTS] if len(groups) == 1 else names
    with weights:
        for name, group in zip(names, groups, strict=True):
            write_shard(folder / name, {key: announced[key] for key in group}, fetch, {"format": "pt"})
            where |= dict.fromkeys(group, name)
    progress(total, total)
    if len(groups) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return names


def _announced(weights: WholeTensors, stored: Stored, dtype: str | None) -> Tensor:
    kept = weights.dtypes[stored.parts[0][0]]
    return torch.empty(stored.shape, dtype=DTYPES[dtype] if dtype and not stored.exact else kept, device="meta")


def _read(weights: WholeTensors, stored: Stored) -> Tensor:
    parts = [_as_stored(weights.read(name), stored.order(name, (0, rows))) for name, rows in stored.parts]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.t() if stored.transposed else whole


def _as_stored(part: Tensor, order: Tensor | None) -> Tensor:
    return part if order is None else torch.empty_like(part).index_copy_(0, order, part)


def _main_dtype(weights: WholeTensors) -> str:
    """The dtype of most elements."""
    counts = dict.fromkeys(weights.dtypes.values(), 0)
    for name, dtype in weights.dtypes.items():
        counts[dtype] += torch.Size(weights.shapes[name]).numel()
    return str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch.")


def _ends(run: Path) -> dict[str, Any]:
    """What config.json says of the tokens that begin and end a text, for a model that was trained from nothing."""
    tokenizer = load_tokenizer(run / TOKENIZER) if (run / TOKENIZER).is_file() else None
    ends = list(own_ends(tokenizer).values()) if tokenizer else []
    said = ends if len(ends) > 1 else ends[0] if ends else None
    return {"bos_token_id": None, "eos_token_id": said, "pad_token_id": None}


def _write_companions(source: Path, folder: Path, base: Mapping[str, Any]) -> None:
    """The tokenizer, and the small files that came with the weights, or those that a model from nothing needs."""
    if (source / TOKENIZER).is_file():
        shutil.copyfile(source / TOKENIZER, folder / TOKENIZER)
    if (source / COMPANIONS).is_dir():
        for file in (source / COMPANIONS).iterdir():
            if file.name != CONFIG:
                shutil.copyfile(file, folder / file.name)
    elif (source / TOKENIZER).is_file() and base["eos_token_id"] is not None:
        _write_json(folder / GENERATION, base)
        last = list(own_ends(load_tokenizer(source / TOKENIZER)))[-1]
        _write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": last})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
