"""One-dimensional tensor parallelism (Megatron, Shoeybi et al. 2019), with or without sequence parallelism.

A block's first linears are divided by their outputs, its second ones by the inputs that come from those, so that each
pair needs one sum over the ranks. The rows of the vocabulary are divided too. What is left, norms and the biases of
second linears, every rank has whole. The stream is repeated on all ranks, or divided by positions (sequence
parallelism, Korthikanti et al. 2022), which replaces the sum by a gather before a pair and a divided sum after it.
"""

from __future__ import annotations

from shoal.mesh import Mesh
from shoal.tensor.grid import Axes, OnGrid
from shoal.tensor.ports import Even, Port, Ports, Positions, Repeated, Still

AXIS = "tp"


class OneD(OnGrid):
    """The interpreter for ``size`` ranks on the mesh axis ``tp``.

    Between a block's two parts activations are [B, T, H] on every rank; with ``sequence`` [B, ⌈T/P⌉, H], some positions
    on each.
    """

    def __init__(self, size: int, *, sequence: bool = False) -> None:
        self.sequence = sequence
        repeated = frozenset[str]() if sequence else frozenset({AXIS})
        axes = Axes(AXIS, second=(AXIS,), positions=AXIS if sequence else None, repeated=repeated)
        super().__init__({AXIS: size}, axes)

    def first(self, in_features: int, mesh: Mesh) -> Ports:
        return Ports(self._stream(mesh), Still(), Still())

    def second(self, in_features: int, mesh: Mesh) -> Ports:
        return Ports(Still(), Still(), self._stream(mesh))

    def logits(self, hidden: int, mesh: Mesh) -> Ports:
        return Ports(Even(mesh.over(AXIS), 1), Still(), Still()) if self.sequence else self.first(hidden, mesh)

    def latents(self, mesh: Mesh) -> tuple[Port, Port]:
        return Still(), self._stream(mesh)

    def _stream(self, mesh: Mesh) -> Port:
        group = mesh.over(AXIS)
        return Positions(group, extent=self.extent) if self.sequence else Repeated(group)
