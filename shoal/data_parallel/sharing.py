"""What the ranks that hold the same parameters divide between them, and in what precision."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.data_parallel.buckets import BUCKET_BYTES
from shoal.data_parallel.stowage import Away


@dataclass(frozen=True)
class Sharing:
    """What replicas divide: nothing, or over ``size`` of them whatever they do not keep whole."""

    size: int = 1
    keep_params: bool = True
    keep_grads: bool = True
    half_grads: bool = False
    """Whether the gradients of parameters in half precision add up in that precision; else they do in float32."""
    masters: bool = True
    """Whether parameters in half precision have float32 copies, which the optimizer works on."""
    versions: bool = False
    """Whether the model may compute with older parameters than the newest."""
    split_backward: bool = False
    """Whether weight gradients may come later than the gradients of inputs (:mod:`shoal.model.linear`)."""
    away: Away | None = None
    """What lives elsewhere than on the device."""
    cap_bytes: int = BUCKET_BYTES
    """Of a bucket: as large as that if its units are not larger."""
