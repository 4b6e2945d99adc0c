"""The experts of a layer over several ranks: each token goes to where its experts are, and what they make of it comes
back.

While tokens are on their way the shared expert is computed, which needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from shoal.comm.world import Group
from shoal.expert.exchange import Trip, arrive, depart, give_back
from shoal.model.choice import Choice
from shoal.model.grouped import expert_outputs
from shoal.model.routed import Experts, combine


class DispatchedExperts(nn.Module):
    """``experts`` that hold this rank's matrices; the ranks of ``group`` have all of them, of each ``parts`` neighbours
    a part of its columns."""

    def __init__(self, experts: Experts, group: Group, parts: int) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = experts.gate_up, experts.down, experts.activation
        self.group, self.parts = group, parts

    def forward(
        self, rows_NH: Tensor, choice: Choice, weights_NE: Tensor, meanwhile: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """As :class:`~shoal.model.routed.Experts`, of the tokens of this rank."""
        trip = Trip.of(choice, self.group, self.parts)
        sent = depart(rows_NH, trip)
        beside = meanwhile()
        rows_MH = arrive(sent, trip)
        made_MH = expert_outputs(rows_MH, self.gate_up.weight, self.down.weight, trip.counts, self.activation)
        made_PH = give_back(made_MH, trip)
        return combine(made_PH, trip.tokens, weights_NE[trip.tokens, trip.experts], len(rows_NH)), beside
