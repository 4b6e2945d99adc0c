"""A Hugging Face folder as a checkpoint of weights: loaded into what each rank holds, or written as one of Shoal's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.agree import together
from shoal.checkpoint.boxes import text
from shoal.checkpoint.folder import prepare, publish, step_folder, write_synced
from shoal.checkpoint.manifest import JSON, MANIFEST, Manifest
from shoal.checkpoint.shards import FLOATING, dtype_code, write_shard
from shoal.comm.world import World
from shoal.errors import CheckpointError, setting
from shoal.model.hf import Weights
from shoal.placement import Box, Fragment

SHARD_BYTES = 2 << 30
"""About how large a file becomes: ranks check files side by side."""


def load_weights(folder: Path, fragments: Sequence[Fragment], world: World) -> None:
    """Fill the ``fragments`` of every rank, weights all of them, from the Hugging Face folder.

    Each rank reads the boxes that it holds, one at a time. Raises :class:`CheckpointError`, the same on every rank and
    before anything is filled, where the folder is damaged or of another model.
    """
    doing = f"cannot load {folder}"
    weights, seen = together(lambda: _matched(folder, fragments), world, doing, share=_shared(fragments))
    if len({json.dumps(config, sort_keys=True) for config, _ in seen}) > 1:
        problem = "the ranks see different models there"
        raise CheckpointError(setting("checkpoint", folder, problem, "use a folder that all machines share"))
    held = {name for _, names in seen for name in names}
    if nowhere := [name for name in weights.shapes if name not in held]:
        raise _other_model(folder, f"weight {nowhere[0]} is not in the model")
    together(lambda: _fill(weights, fragments), world, doing)


def write_checkpoint(
    folder: Path, weights: Weights, meta: Mapping[str, JSON], progress: Callable[[int, int], None]
) -> Path:
    """Write ``weights`` as the checkpoint of step 0 below ``folder``, a tensor at a time; returns its path.

    Dtypes stay as they are. ``progress`` hears (bytes written, bytes in all).
    """
    aside, final = prepare(folder, 0), step_folder(folder, 0)
    sizes = {name: _meta(weights, name).nbytes for name in weights.shapes}
    files, tensors, done = {}, {}, 0
    weights.check_tied()
    for number, names in enumerate(split(sizes, SHARD_BYTES)):
        file = f"part-{number:05d}.safetensors"
        keys = {f"weight/{name}{text(_whole(weights, name))}": name for name in names}

        def fetch(key: str, keys: dict[str, str] = keys) -> torch.Tensor:
            nonlocal done
            name = keys[key]
            progress(done, sum(sizes.values()))
            done += sizes[name]
            return weights.read(name, _whole(weights, name))

        announced = {key: _meta(weights, name) for key, name in keys.items()}
        files[file] = write_shard(aside / file, announced, fetch).model_dump()
        for key, name in keys.items():
            boxes = [{"box": _whole(weights, name), "file": file, "key": key}]
            dtype = dtype_code(announced[key], name)
            tensors[name] = {"shape": weights.shapes[name], "dtype": dtype, "boxes": boxes}
    contents = {"step": 0, "meta": meta, "files": files, "tensors": {"weight": tensors}}
    write_synced(aside / MANIFEST, Manifest.model_validate(contents).dumps())
    publish(aside, final)
    progress(done, done)
    return final


def split(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """The names in order, in groups of at most ``most`` bytes; what is larger by itself is alone."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group


def _matched(folder: Path, fragments: Sequence[Fragment]) -> Weights:
    """The folder's weights, once they are known to fit the fragments."""
    weights = Weights(folder)
    for fragment in fragments:
        name, shape = fragment.piece.name, fragment.piece.shape
        if fragment.kind != "weight":
            problem = f"it has weights alone, and no {fragment.kind}"
            raise CheckpointError(setting("checkpoint", folder, problem, "load it with states=False"))
        if name not in weights.shapes:
            raise _other_model(folder, f"weight {name} is not in it")
        if weights.shapes[name] != shape:
            raise _other_model(folder, f"weight {name} has shape {weights.shapes[name]} in it and {shape} in the model")
        if dtype_code(fragment.tensor, name) not in FLOATING:
            raise _other_model(folder, f"weight {name} is {fragment.tensor.dtype} in the model")
    return weights


def _shared(fragments: Sequence[Fragment]) -> Callable[[Weights], tuple[Any, list[str]]]:
    return lambda weights: (weights.config, sorted({fragment.piece.name for fragment in fragments}))


@torch.no_grad()
def _fill(weights: Weights, fragments: Sequence[Fragment]) -> None:
    weights.check_tied()
    for fragment in fragments:
        fragment.tensor.copy_(weights.read(fragment.piece.name, fragment.piece.box))


def _whole(weights: Weights, name: str) -> Box:
    return tuple((0, n) for n in weights.shapes[name])


def _meta(weights: Weights, name: str) -> torch.Tensor:
    return torch.empty(weights.shapes[name], dtype=weights.dtypes[name], device="meta")


def _other_model(folder: Path, fault: str) -> CheckpointError:
    return CheckpointError(setting("checkpoint", folder, f"of another model: {fault}", "load it into its own model"))
