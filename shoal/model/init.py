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
from shoal.storage import stands_in


def fill(local: Tensor, placement: Placement, seed: int, std: float) -> None:
    """Fill the pieces of ``local`` with their initial values, and its padding with zeros.

    Matrices are normal with standard deviation ``std``; vectors are ones (the weights of norms) unless their name ends
    in "bias", which is zero. With a ``std`` of 0 everything is.
    """
    if stands_in(local):
        return
    with torch.no_grad():
        local.zero_()
        for piece in placement.pieces:
            if len(piece.shape) > 1:
                _draw(piece.of(local), piece, seed, std)
            elif std and not piece.name.endswith("bias"):
                piece.of(local).fill_(1.0)


def _draw(out: Tensor, piece: Piece, seed: int, std: float) -> None:
    generator = torch.Generator()
    row = torch.empty(prod(piece.shape[1:]), dtype=torch.float32)
    rest = tuple(slice(start, stop) for start, stop in piece.box[1:])
    start, stop = piece.box[0]
    for number in range(start, stop):
        key = blake2b(f"{seed}/{piece.name}/{number}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(key, "little") >> 1)
        row.normal_(0.0, std, generator=generator)
        out[number - start].copy_(row.view(piece.shape[1:])[rest])
