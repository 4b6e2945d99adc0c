"""Two-dimensional tensor parallelism: SUMMA on a square (van de Geijn & Watts 1997; Optimus, Xu et al. 2021).

Rank (i, j) of q×q has block (i, j) of every activation: samples i, features j. Of a weight [out, in] it has the out
features j and the in features i. X·Wᵀ needs the whole rows of X, from the ranks of one row of the grid, and the whole
columns of W, from those of one column; its block of the result then is all there, in the place where the next linear
and the residual sum want it. The in-features of W are divided as the features of X are, so the sum over blocks t,

    Y(i, j) = Σ_t X(i, t) · W(t, j)

may as well be taken a block at a time: the *loop* form, which holds O(1/q²) of either operand where the *gathered* one
holds O(1/q), in q times as many messages of the same words in all. Embedding and output matrix are gathered in both.
"""

from __future__ import annotations

from torch import Tensor, nn

from shoal.comm.world import Group
from shoal.layout.kinds import split_evenly
from shoal.mesh import Mesh
from shoal.tensor.grid import Axes, OnGrid
from shoal.tensor.linear import DividedLinear
from shoal.tensor.ports import Port, Ports, Repeated, Still, shares
from shoal.tensor.summa import summa

ROW, COL = "row", "col"


class TwoD(OnGrid):
    """The interpreter for a ``side``·``side`` grid on the mesh axes ``row`` (i) and ``col`` (j), ``loop`` saying in
    which form; ``depth`` such grids, each with samples of its own, are 2.5-D.

    Activations are [⌈B/q⌉, T, H/q] on every rank.
    """

    def __init__(self, side: int, *, depth: int = 1, loop: bool = False) -> None:
        self.loop = loop
        samples = (ROW,) if depth == 1 else ("depth", ROW)
        axes = Axes(COL, hidden=COL, samples=samples, attended=samples, first=(ROW,), second=(ROW,))
        super().__init__({"depth": depth, ROW: side, COL: side}, axes)

    def first(self, in_features: int, mesh: Mesh) -> Ports:
        return Ports(shares(mesh.over(COL), -1, in_features), shares(mesh.over(ROW), -1, in_features), Still())

    second = first

    def latents(self, mesh: Mesh) -> tuple[Port, Port]:
        return Repeated(mesh.over(COL)), Repeated(mesh.over(COL))

    def linear(self, linear: nn.Linear, ports: Ports, parts: tuple[int, ...], mesh: Mesh) -> nn.Module:
        if not self.loop:
            return super().linear(linear, ports, parts, mesh)
        return LoopedLinear(linear, ports, parts, mesh.over(COL), mesh.over(ROW))


class LoopedLinear(DividedLinear):
    """The same, a block at a time."""

    def __init__(self, linear: nn.Linear, ports: Ports, parts: tuple[int, ...], across: Group, down: Group) -> None:
        super().__init__(linear, ports, parts)
        self.across, self.down = across, down
        self.widths = split_evenly(linear.in_features, down.size)

    def block(self, x: Tensor) -> Tensor:
        return summa(x, self.weight, self.bias, self.across, self.down, self.widths)
