"""Load: a checkpoint saved under any layout, into what each rank holds under this one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shoal.checkpoint.agree import together
from shoal.checkpoint.boxes import cover, extents, within
from shoal.checkpoint.folder import resolve
from shoal.checkpoint.hf import load_weights
from shoal.checkpoint.manifest import Manifest, StoredTensor, read_manifest
from shoal.checkpoint.shards import FLOATING, dtype_code, verify_shard
from shoal.comm.world import World
from shoal.errors import CheckpointError, setting
from shoal.model.hf import is_folder
from shoal.placement import Fragment


@dataclass(frozen=True)
class Read:
    """A copy to be made: the ``part`` of the tensor under ``key`` in a file, to the view ``into`` of the model."""

    key: str
    part: tuple[slice, ...]
    into: Tensor


@dataclass(frozen=True)
class Plan:
    """What one rank will read, by file, and the checkpoint's weights that it does not hold, by their numbers."""

    path: Path
    manifest: Manifest
    reads: dict[str, list[Read]]
    unheld: list[int]


def load(path: Path, fragments: Sequence[Fragment], world: World) -> tuple[int, dict[str, Any]]:
    """Fill the ``fragments`` of every rank from a checkpoint; returns its step and its meta.

    ``path`` is a checkpoint, a run's folder, whose latest is taken, or a Hugging Face folder, which has weights alone
    and is at step 0. Each rank reads the boxes that meet its own and
    no more. Between floating dtypes values are cast; other dtypes must be the same.

    Raises :class:`CheckpointError`, the same on every rank and before anything is filled, when the checkpoint is
    damaged, or is of another model: a tensor of the fragments is missing or has another shape, or no rank holds one of
    the checkpoint's weights. Optimizer states that no rank holds are left out.
    """
    if is_folder(path):
        load_weights(path, fragments, world)
        return 0, {}
    doing = f"cannot load {path}"
    plan, seen = together(
        lambda: _plan(resolve(path), fragments),
        world,
        doing,
        share=lambda plan: [plan.manifest.checksum(), plan.unheld],
    )
    _agree(plan, seen)
    share = islice(sorted(plan.manifest.files), world.rank, None, world.size)
    together(lambda: _verify_files(plan.path, plan.manifest, share), world, doing)
    together(lambda: _fill(plan), world, doing)
    return plan.manifest.step, dict(plan.manifest.meta)


def _plan(path: Path, fragments: Sequence[Fragment]) -> Plan:
    """Match the checkpoint with the model, before a byte of contents is read."""
    manifest = read_manifest(path)
    reads: dict[str, list[Read]] = defaultdict(list)
    faults = []
    for fragment in fragments:
        name = f"{fragment.kind} {fragment.piece.name}"
        stored = manifest.tensors.get(fragment.kind, {}).get(fragment.piece.name)
        if stored is None:
            faults.append(f"{name} is not in it")
        elif problem := _mismatch(stored, fragment, name):
            faults.append(f"{name} has {problem}")
        else:
            _schedule(stored, fragment, reads)
    if faults:
        if "weight" not in {fault.partition(" ")[0] for fault in faults}:
            problem = f"its optimizer states are of another set of parameters: {'; '.join(faults[:3])}"
            raise CheckpointError(setting("checkpoint", path, problem, "load the weights alone, with states=False"))
        raise _other_model(path, faults)
    held = {fragment.piece.name for fragment in fragments if fragment.kind == "weight"}
    unheld = [number for number, name in enumerate(_weights(manifest)) if name not in held]
    return Plan(path, manifest, reads, unheld)


def _mismatch(stored: StoredTensor, fragment: Fragment, name: str) -> str | None:
    """What keeps the stored tensor out of the fragment."""
    if stored.shape != fragment.piece.shape:
        return f"shape {stored.shape} in it and {fragment.piece.shape} in the model"
    code = dtype_code(fragment.tensor, name)
    if stored.dtype != code and not {stored.dtype, code} <= FLOATING:
        return f"dtype {stored.dtype} in it and {code} in the model"
    return None


def _schedule(stored: StoredTensor, fragment: Fragment, reads: dict[str, list[Read]]) -> None:
    """Add the copies that fill ``fragment``, each element once."""
    target = fragment.piece.box
    assert fragment.tensor.shape == extents(target), f"{fragment.piece} is held as {tuple(fragment.tensor.shape)}"
    found, missing = cover(target, ((source.box, source) for source in stored.boxes))
    assert not missing, "the manifest covers every tensor"
    for box, source in found:
        read = Read(source.key, within(box, source.box), fragment.tensor[within(box, target)])
        reads[source.file].append(read)


def _agree(plan: Plan, seen: Sequence[tuple[str, list[int]]]) -> None:
    """Raise unless all ranks read one checkpoint and hold all its weights between them."""
    if len({checksum for checksum, _ in seen}) > 1:
        problem = "the ranks see different checkpoints there"
        raise CheckpointError(setting("checkpoint", plan.path, problem, "use a folder that all machines share"))
    nowhere = set.intersection(*(set(unheld) for _, unheld in seen))
    if nowhere:
        names = _weights(plan.manifest)
        raise _other_model(plan.path, [f"weight {names[number]} is not in the model" for number in sorted(nowhere)])


def verify(path: Path, progress: Callable[[int, int], None] | None = None) -> Manifest:
    """Read the whole checkpoint and compare it with its manifest; ``progress`` hears (bytes read, bytes in all).

    Raises :class:`CheckpointError` naming what is damaged.
    """
    manifest = read_manifest(path)
    done, total = 0, sum(stored.size for stored in manifest.files.values())
    for name in sorted(manifest.files):
        _verify_files(path, manifest, [name])
        done += manifest.files[name].size
        if progress is not None:
            progress(done, total)
    return manifest


def _verify_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Check some of the files against the manifest."""
    expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
    for tensors in manifest.tensors.values():
        for tensor in tensors.values():
            for stored in tensor.boxes:
                expected[stored.file][stored.key] = (tensor.dtype, extents(stored.box))
    for name in names:
        verify_shard(path / name, manifest.files[name], expected[name])


@torch.no_grad()
def _fill(plan: Plan) -> None:
    for file, reads in plan.reads.items():
        with safe_open(plan.path / file, framework="pt") as shard:
            for read in reads:
                read.into.copy_(shard.get_slice(read.key)[read.part])


def _weights(manifest: Manifest) -> list[str]:
    return sorted(manifest.tensors.get("weight", {}))


def _other_model(path: Path, faults: Sequence[str]) -> CheckpointError:
    shown, more = faults[:3], len(faults) - 3
    problem = "; ".join(shown) + (f"; and {more} more" if more > 0 else "")
    return CheckpointError(setting("checkpoint", path, f"of another model: {problem}", "load it into its own model"))
