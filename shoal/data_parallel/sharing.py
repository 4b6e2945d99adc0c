"""What the ranks that hold the same parameters divide between them, and in what precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shoal.data_parallel.buckets import BUCKET_BYTES
from shoal.data_parallel.stowage import Away
from shoal.mesh import Grid
from shoal.placement import Division, Holders, divide, serve


@dataclass(frozen=True)
class Sharing:
    """What replicas divide: nothing, or over ``size`` of them whatever they do not keep whole; or the first of them do,
    as ``servers`` of all."""

    size: int = 1
    servers: int = 0
    keep_params: bool = True
    keep_grads: bool = True
    half_grads: bool = False
    """Whether the gradients of parameters in half precision add up in that precision; else they do in float32."""
    masters: bool = True
    """Whether parameters in half precision have float32 copies, which the optimizer works on."""
    versions: bool = False
    """Whether the model may compute with older parameters than the newest."""
    int8_gather: bool = False
    """Whether parameters are gathered rounded to blocks of int8. What is kept whole then has masters apart from it,
    which are exact."""
    int8_reduce: bool = False
    """Whether the terms of sums of gradients are rounded to blocks of int8."""
    split_backward: bool = False
    """Whether weight gradients may come later than the gradients of inputs (:mod:`shoal.model.linear`)."""
    away: Away | None = None
    """What lives elsewhere than on the device."""
    cap_bytes: int = BUCKET_BYTES
    """Of a bucket: as large as that if its units are not larger."""

    def divider(self, grid: Grid, rank: int) -> Callable[[Holders], Division]:
        """Divides what ranks hold, as ``rank`` sees it."""
        if self.servers:
            return partial(serve, grid=grid, rank=rank, servers=self.servers)
        return partial(divide, grid=grid, rank=rank, size=self.size)
