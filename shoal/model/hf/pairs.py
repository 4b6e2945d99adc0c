"""Rotary features as pairs side by side, and as two halves.

A rotary angle turns two features of a head. DeepSeek keeps them side by side, (0, 1), (2, 3), …; Shoal's decoder has
the first of all pairs and then the second. Scores are sums over features, so weights whose rows are put in the other
order give the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.config import Model


@dataclass(frozen=True)
class Pairs:
    """Rows of a weight in heads of ``head``, of which the last ``turned`` are pairs in the file and halves here."""

    head: int
    turned: int

    def stored(self, start: int, stop: int) -> Tensor:
        """Where in the file the rows ``start`` … ``stop`` − 1 are: int64 [stop − start]."""
        rows = torch.arange(start, stop)
        at = rows % self.head - (self.head - self.turned)  # negative for what does not turn
        pair, second = at % (self.turned // 2), at >= self.turned // 2
        return torch.where(at < 0, rows, rows - at + 2 * pair + second)


def pairs_of(module: str, model: Model) -> Pairs | None:
    """Those of the rows of ``module``, of latent attention."""
    if model.latent is None:
        return None
    turned = model.latent.turned_dim
    queries, keys = Pairs(model.head_dim, turned), Pairs(turned, turned)
    return {"q": queries, "q_up": queries, "k_turned": keys}.get(module.split(".")[-1])
