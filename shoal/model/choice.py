"""Which tokens go to which experts, as pairs that are sorted by expert: the one place where sizes depend on values.

Of tensors that only stand for some nobody knows what a gate chooses. There all experts are taken to have as many tokens
each: as many pairs as that makes, without saying which.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from shoal.layout.kinds import split_evenly
from shoal.storage import stands_in


@dataclass(frozen=True)
class Choice:
    """``kept``, bool [N, E], says which of N tokens go to each of E experts. ``even`` is the part of the tokens that
    goes to each of them where load is even."""

    kept_NE: Tensor
    even: Fraction

    def counts(self) -> Tensor:
        """int64 [E]: how many go to each expert."""
        return torch.tensor(self._even_counts()) if stands_in(self.kept_NE) else self.kept_NE.sum(0)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """The tokens and the experts of all pairs, int64 [P] each, sorted by expert, then by token."""
        if stands_in(self.kept_NE):
            experts, tokens = self.kept_NE.new_empty(sum(self._even_counts()), 2, dtype=torch.int64).unbind(1)
        else:
            experts, tokens = self.kept_NE.t().nonzero(as_tuple=True)
        return tokens, experts

    def _even_counts(self) -> tuple[int, ...]:
        tokens, experts = self.kept_NE.shape
        return split_evenly(round(tokens * experts * self.even), experts)
