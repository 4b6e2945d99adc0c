"""Where experts lie: over ranks that have other things to do besides.

Experts have no mesh axis of their own. The ranks of one pipeline stage, in order (dp, cp, then the axes of tensor
parallelism, the last fastest), are numbered i = 0, 1, …; of these numbers

    etp coordinate = i mod etp,    ep coordinate = (i div etp) mod ep,

so ep·etp neighbours have all experts between them: E/ep experts on each ep coordinate, and of each expert 1/etp of its
columns on each etp coordinate. What has the same coordinates further on are replicas, whose gradients are summed.
Nothing lists them: :class:`~shoal.placement.Census` derives them from the boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.layout.kinds import split_evenly
from shoal.mesh import Coords, Mesh
from shoal.model.roles import Role, logical_parts
from shoal.placement import Piece, Placement, Rule, Span


@dataclass(frozen=True)
class Spread:
    """``experts`` of a layer over ``ep`` times ``etp`` ranks, neighbours on ``axes``: mesh axes with their sizes,
    outermost first."""

    axes: tuple[tuple[str, int], ...]
    experts: int
    ep: int = 1
    etp: int = 1

    @property
    def own(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ep

    @property
    def ranks(self) -> int:
        """Those that have all experts between them."""
        return self.ep * self.etp

    def number(self, coords: Coords) -> int:
        """Of the rank at ``coords`` among those of its stage."""
        found = 0
        for name, size in self.axes:
            found = found * size + coords[name]
        return found

    def of(self, coords: Coords) -> tuple[int, int]:
        """The ep and the etp coordinate of the rank at ``coords``."""
        return self.number(coords) // self.etp % self.ep, self.number(coords) % self.etp

    def neighbours(self, mesh: Mesh) -> tuple[int, ...]:
        """The ranks that have all experts between them, this one among them: by ep coordinate, then by etp
        coordinate."""
        stage, first = mesh.ranks_over(*(name for name, _ in self.axes)), self.number(mesh.coords)
        first -= first % self.ranks
        return stage[first : first + self.ranks]

    def place(self, role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
        """Where the matrices of experts lie: [E·rows, columns] in all. Of those that come first an expert's rows are
        divided over the etp coordinate, of the others its columns."""
        parts, each = logical_parts(role, module, parameter), len(role.parts)
        by_columns = role.kind == "expert_down"

        def at(coords: Coords) -> Placement:
            ep, etp = self.of(coords)
            columns = _share(shape[1], self.etp, etp) if by_columns else (0, shape[1])
            pieces, end = [], 0
            for name, rows in parts[ep * self.own * each : (ep + 1) * self.own * each]:
                box = (0, rows) if by_columns else _share(rows, self.etp, etp)
                start, end = end, end + box[1] - box[0]
                place = (start, end), (0, columns[1] - columns[0])
                pieces.append(Piece(name, (rows, shape[1]), (box, columns), place))
            return Placement((end, columns[1] - columns[0]), tuple(pieces))

        if self.ranks == 1:
            placement = at({name: 0 for name, _ in self.axes})
            return Rule(lambda _: placement)
        return Rule(at, frozenset(name for name, _ in self.axes))


def _share(total: int, size: int, at: int) -> Span:
    shares = split_evenly(total, size)
    return sum(shares[:at]), sum(shares[: at + 1])
