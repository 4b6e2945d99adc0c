"""Initial weights that do not depend on the layout.

Each row of a matrix is drawn in float32 on the CPU from (seed, logical name, row), and a rank draws only the rows that
its pieces meet. So one seed gives the same full weights under every layout, bit for bit, and no rank ever makes more
than it holds and one row.
"""

from __future__ import annotations

from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from shoal.placement import Piece, Placement

_MASK = (1 << 64) - 1


def fill(local: Tensor, placement: Placement, seed: int, std: float) -> None:
    """Fill the pieces of ``local`` with their initial values, and its padding with zeros.

    Matrices are normal with standard deviation ``std``; vectors are ones (the weights of norms) unless their name ends
    in "bias", which is zero.
    """
    with torch.no_grad():
        local.zero_()
        for piece in placement.pieces:
            if len(piece.shape) > 1:
                _draw(piece.of(local), piece, seed, std)
            elif not piece.name.endswith("bias"):
                piece.of(local).fill_(1.0)


def _draw(out: Tensor, piece: Piece, seed: int, std: float) -> None:
    base = int.from_bytes(blake2b(f"{seed}/{piece.name}".encode(), digest_size=8).digest(), "little")
    generator = torch.Generator()
    row = torch.empty(prod(piece.shape[1:]))
    rest = tuple(slice(start, stop) for start, stop in piece.box[1:])
    start, stop = piece.box[0]
    for number in range(start, stop):
        generator.manual_seed(_mix(base + number))
        row.normal_(0.0, std, generator=generator)
        out[number - start].copy_(row.view(piece.shape[1:])[rest])


def _mix(x: int) -> int:
    """Spread consecutive integers over 63 bits (the finaliser of SplitMix64), as seeds of independent generators."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 1
