"""Three-dimensional tensor parallelism (Bian et al. 2021), on any a×b×c.

A product of M·K by K·N elements is a box of M·K·N multiplications, which a·b·c ranks cut along all three sides: rank
(i, l, j) multiplies the rows i of X, in-features l, by the out-features j of W. No rank keeps what it multiplies: X is
gathered from the c ranks among which its rows are divided further, W from a ranks, its in-features divided further, and
the sum over l leaves each of b ranks some of the rows of Y.

So in X in-features lie over b and rows are divided further over c, in Y it is the other way round, and the next linear
must exchange the two. That is what a block's second linears do: after each pair the stream is as it was before.
Between the pair attention finds whole sequences, since Y's rows are divided by samples; those of the stream are divided
by positions. 1×1×P is one dimension with sequence parallelism, P×1×1 is fully sharded data parallelism.
"""

from __future__ import annotations

from shoal.layout.kinds import split_evenly
from shoal.mesh import Mesh
from shoal.tensor.grid import Axes, OnGrid
from shoal.tensor.ports import Port, Ports, Positions, Still, even, shares

A, B, C = "a", "b", "c"


class ThreeD(OnGrid):
    """The interpreter for an ``a``·``b``·``c`` grid on the mesh axes of those names.

    The stream is [samples of one of a, positions of one of c, hidden features of one of b] on every rank: [⌈B/(ab)⌉·b,
    ⌈T/c⌉, H/b]; between a pair of linears activations are [⌈B/(ab)⌉, T, columns of one of c].
    """

    def __init__(self, a: int, b: int, c: int) -> None:
        axes = Axes(C, hidden=B, samples=(A,), attended=(A, B), positions=C, first=(B, A), second=(C, A))
        super().__init__({A: a, B: b, C: c}, axes)

    def first(self, in_features: int, mesh: Mesh) -> Ports:
        return Ports(self._stream(mesh), self._weight(in_features, B, mesh), even(mesh.over(B), 0))

    def second(self, in_features: int, mesh: Mesh) -> Ports:
        return Ports(even(mesh.over(B), 0), self._weight(in_features, C, mesh), self._stream(mesh))

    def logits(self, hidden: int, mesh: Mesh) -> Ports:
        return Ports(even(mesh.over(C), 1), self._weight(hidden, B, mesh), even(mesh.over(B), 1))

    def latents(self, mesh: Mesh) -> tuple[Port, Port]:
        return even(mesh.over(B), 0), self._stream(mesh)

    def _stream(self, mesh: Mesh) -> Port:
        group = mesh.over(C)
        return Positions(group, extent=self.extent) if group.size > 1 else Still()

    def _weight(self, in_features: int, outer: str, mesh: Mesh) -> Port:
        own = split_evenly(in_features, self.sizes[outer])[mesh.coords[outer]]
        return shares(mesh.over(A), -1, own)
