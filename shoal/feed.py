"""A batch on its way into the engine: looked over, brought to the device, divided over the micro-batches."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from shoal.comm.collectives import all_reduce
from shoal.comm.world import Group
from shoal.errors import ConfigError, LayoutError, setting
from shoal.model.context import Batch


def micro_batches(batch: Batch, count: int, device: torch.device) -> list[dict[str, Tensor]]:
    """The samples of ``batch`` (dim 0 of every tensor) on ``device``, ``count`` equal parts in order.

    Raises :class:`ConfigError` for what is not a batch, and :class:`LayoutError` where it cannot be divided.
    """
    if other := [name for name, value in batch.items() if not isinstance(value, Tensor)]:
        raise ConfigError(f"Engine: a batch holds tensors, with samples in dim 0; {other[0]} is none")
    sizes = {name: len(tensor) if tensor.ndim else 0 for name, tensor in batch.items()}
    if len(set(sizes.values())) != 1:
        raise ConfigError(f"Engine: the tensors of a batch must have one number of samples in dim 0; they have {sizes}")
    samples = next(iter(sizes.values()))
    if samples == 0:
        raise ConfigError("Engine: the batch has no samples; give every replica at least one a micro-batch")
    if samples % count:
        raise LayoutError(
            setting("layout.mb", count, f"does not divide the {samples} samples of this rank",
                    f"use one of {[n for n in range(1, samples + 1) if samples % n == 0]}")
        )  # fmt: skip
    here = {name: _bring(tensor, device) for name, tensor in batch.items()}
    size = samples // count
    return [{name: tensor[i * size : (i + 1) * size] for name, tensor in here.items()} for i in range(count)]


def _bring(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. From pinned memory a GPU fetches it by itself, and the host does not wait."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def check_same(batch: Batch, group: Group, device: torch.device) -> None:
    """Raise :class:`ConfigError` on all ranks of ``group`` unless all were given the same ``batch``."""
    digest = blake2b(digest_size=7)
    for name in sorted(batch):
        digest.update(name.encode())
        digest.update(batch[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    number = int.from_bytes(digest.digest(), "little")
    seen = torch.tensor([number, -number], device=device)
    all_reduce(seen, group, "start", "min")
    if seen[0] != -seen[1]:
        raise ConfigError(
            "Engine: the ranks of one replica were given different samples; its pipeline stages and tensor-parallel "
            'ranks, which share engine.mesh.coords["dp"], take the same batch'
        )
