"""2.5-dimensional tensor parallelism (Tesseract, Wang et al. 2021): ``depth`` squares side by side.

Rank (i, j) of square k works as in two dimensions on block k·q + i of the samples. All squares have the same blocks of
the weights, so the gradients of each are summed over the depth; and since they have them alike, ZeRO may divide them
there as it does over replicas.
"""

from __future__ import annotations

from shoal.tensor.two_d import TwoD


class TwoAndHalfD(TwoD):
    """The interpreter for ``depth`` grids of ``side``·``side`` on the mesh axes ``depth``, ``row`` and ``col``."""

    def __init__(self, side: int, depth: int, *, loop: bool = False) -> None:
        super().__init__(side, depth=depth, loop=loop)
