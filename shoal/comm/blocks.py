"""Numbers as blocks of int8: a quarter of the bytes of float32, at an error that each block bounds for itself.

A block is ``BLOCK`` consecutive elements x with one scale s = max|x|/127. It holds round(x/s), and stands for that
times s: no element is off by more than s/2, which is max|x|/254. A block in which something is not finite is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
_SCALE_BYTES = 4
_LARGEST = 127
_AT_ONCE = 1 << 10
"""Blocks whose intermediate results stay in a cache."""


def packed_bytes(numel: int) -> int:
    """What so many elements take: whole blocks, and after them their scales in float32."""
    return -(-numel // BLOCK) * (BLOCK + _SCALE_BYTES)


def pack(x: Tensor, packed: Tensor) -> None:
    """Write ``x`` (flat, of any floating dtype) to ``packed`` (uint8, :func:`packed_bytes` of its elements)."""
    values, scales = _parts(packed)
    whole = x.numel() // BLOCK
    for start in range(0, whole, _AT_ONCE):
        stop = min(start + _AT_ONCE, whole)
        _round(x[start * BLOCK : stop * BLOCK].view(-1, BLOCK), values[start:stop], scales[start:stop])
    if rest := x.numel() % BLOCK:
        padded = x.new_zeros(1, BLOCK)
        padded[0, :rest] = x[whole * BLOCK :]
        _round(padded, values[whole:], scales[whole:])


def unpack(packed: Tensor, out: Tensor) -> None:
    """Write what ``packed`` stands for to ``out`` (flat, of any floating dtype)."""
    values, scales = _parts(packed)
    whole = out.numel() // BLOCK
    torch.mul(values[:whole], scales[:whole], out=out[: whole * BLOCK].view(-1, BLOCK))
    if rest := out.numel() % BLOCK:
        torch.mul(values[whole, :rest], scales[whole], out=out[whole * BLOCK :])


def _round(blocks: Tensor, values: Tensor, scales: Tensor) -> None:
    """``blocks`` [n, BLOCK] → ``values`` (int8) [n, BLOCK], ``scales`` (float32) [n, 1]."""
    wide = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    largest = torch.linalg.vector_norm(wide, ord=torch.inf, dim=1, keepdim=True)
    # The scale of a block of zeros, or of numbers too small for one, is the least that there is.
    scales.copy_((largest / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny))
    values.copy_((wide / scales).round_().clamp_(-_LARGEST, _LARGEST))


def _parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The values [n, BLOCK] of n blocks, and their scales [n, 1]."""
    end = packed.numel() // (BLOCK + _SCALE_BYTES) * BLOCK
    return packed[:end].view(torch.int8).view(-1, BLOCK), packed[end:].view(torch.float32).view(-1, 1)
