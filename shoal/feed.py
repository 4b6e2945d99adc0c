"""A batch on its way into the engine: looked over, brought to the device, divided over the micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import chain

import torch
from torch import Tensor

from shoal.comm.collectives import all_reduce
from shoal.comm.world import Group
from shoal.errors import ConfigError, LayoutError, setting
from shoal.layout import Layout
from shoal.model.context import Batch
from shoal.model.task import Task


def micro_batches(
    batch: Batch, count: int, device: torch.device, part: Callable[[Batch], Batch] = lambda whole: whole
) -> list[Batch]:
    """The samples of ``batch`` (dim 0 of every tensor) on ``device``, ``count`` equal parts in order; of each what
    ``part`` makes of it.

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
    return [part({name: tensor[i * size : (i + 1) * size] for name, tensor in here.items()}) for i in range(count)]


def _bring(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. From pinned memory a GPU fetches it by itself, and the host does not wait."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def weights_of(task: Task, batches: Sequence[Batch], device: torch.device) -> Tensor:
    """The denominator that each micro-batch brings."""
    weights = [torch.as_tensor(task.weight(one)) for one in batches]
    return torch.stack([weight.to(device, torch.float64) for weight in weights])


def loss_scale(weight: Tensor, scale: float) -> Tensor:
    """What summed losses whose denominator is ``weight`` are multiplied by: NaN, of which every gradient then is, where
    that is not finite."""
    return torch.where(weight.isfinite(), torch.where(weight > 0, scale / weight, 0.0), torch.nan)


def check_same(batch: Batch, group: Group, device: torch.device) -> None:
    """Raise :class:`ConfigError` on all ranks of ``group`` unless all were given the same ``batch``."""
    parts = ((name.encode(), batch[name].detach().cpu().contiguous()) for name in sorted(batch))
    if not _same(chain.from_iterable((name, _bytes(tensor)) for name, tensor in parts), group, device):
        raise ConfigError(
            "Engine: the ranks of one replica were given different samples; its pipeline stages, context- and "
            'tensor-parallel ranks, which share engine.mesh.coords["dp"], take the same batch'
        )


def check_same_plan(layout: Layout, passes: object, group: Group, device: torch.device) -> None:
    """Raise :class:`LayoutError` on all ranks of ``group`` unless all have the same layout, and make of it the same
    ``passes``, which are in the text that it prints: ranks with different ones would wait for each other for ever."""
    if not _same([f"{layout}\n{passes}".encode()], group, device):
        raise LayoutError(
            setting("layout", str(layout), "ranks were given different layouts or models, so their steps do not match",
                    "start all of them with the same run file and the same --layout")
        )  # fmt: skip


def _same(data: Iterable[bytes], group: Group, device: torch.device) -> bool:
    digest = blake2b(digest_size=7)
    for part in data:
        digest.update(part)
    number = int.from_bytes(digest.digest(), "little")
    seen = torch.tensor([number, -number], device=device)
    all_reduce(seen, group, "start", "min")
    return bool(seen[0] == -seen[1])


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
