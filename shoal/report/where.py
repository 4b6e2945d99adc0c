"""Where the model states of a rank live, in bytes: on its device, in the host's memory, on a disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from shoal.data_parallel.buckets import Bucket
from shoal.data_parallel.sharing import Sharing
from shoal.data_parallel.stowage import DEVICE, Stowage

HOST, DISK = "cpu", "nvme"
NAMES = {DEVICE: "on the device", HOST: "on the host", DISK: "on disk"}
"""The places, by their names in a layout."""


def bytes_by_place(buckets: Iterable[Bucket], sharing: Sharing) -> Counter[str]:
    """What one rank keeps of ``buckets`` that are trained: parameters, masters, optimizer states and gradients, those
    with the part of its own alone that it has no more of between passes. What the engine makes buffers of, its
    :class:`~shoal.data_parallel.flat.Flat` says; this follows it."""
    found: Counter[str] = Counter()
    for bucket in buckets:
        size, whole, width = bucket.high - bucket.low, bucket.size, bucket.dtype.itemsize
        wide = torch.promote_types(bucket.dtype, torch.float32)
        mixed = sharing.masters and wide != bucket.dtype
        at = Stowage(bucket, sharing.away, trains=True, mixed=mixed)
        divided = size < whole
        versions = sharing.versions or (sharing.int8_gather and sharing.keep_params)
        keeps_whole = (sharing.keep_params or not divided) and at.parked_to == 0
        found[DEVICE] += width * (whole if keeps_whole else size - at.parked_to)
        exact = len(bucket.states) * wide.itemsize
        master = wide.itemsize if sharing.masters else width
        found[DEVICE] += (size - at.cut) * (exact + master * (versions or at.apart))
        gradient = width if sharing.half_grads else wide.itemsize
        if not at.grads:
            found[DEVICE] += gradient * (whole if sharing.keep_grads or not divided else size)
        for start, stop, optimizer, params in at.segments:
            if params != DEVICE:
                found[params] += (stop - start) * width
            if start >= at.cut:
                continue
            found[optimizer] += (stop - start) * (exact + master * (optimizer != DEVICE or at.apart))
            if at.grads or (optimizer == HOST and (sharing.away is None or sharing.away.early)):
                found[HOST] += (stop - start) * gradient
    return found
