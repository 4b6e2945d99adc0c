"""Attention on a grid of U · R ranks: U next to each other exchange positions for heads, R across pass on keys and
values (USP, Fang & Zhao 2024). Ring, gather and Ulysses alone are grids with a side of one.

Inside a machine the exchange is quick, and heads limit U; around it the ring hides behind the work of its hops. All
this is in place of a model's own attention core; queries and keys have been turned to their true positions before.
"""

from __future__ import annotations

from torch import Tensor, nn

from shoal.comm.world import Group
from shoal.context.gather import gathered_attention
from shoal.context.plan import Plan
from shoal.context.ring import ring_attention
from shoal.context.ulysses import to_heads, to_positions
from shoal.model.context import Context


class DividedAttention(nn.Module):
    """Softmax attention of the positions that this rank has, over those of all; ``whole`` is that of a context whose
    positions are not divided. ``inside`` is the group that exchanges heads, ``around`` the one over which keys and
    values go, gathered at once if ``gather``; ``with_rows`` that group where rows of a grid divide positions too."""

    def __init__(self, whole: nn.Module, inside: Group, around: Group, with_rows: Group, *, gather: bool) -> None:
        super().__init__()
        self.whole, self.inside, self.around, self.with_rows = whole, inside, around, with_rows
        self.over_keys = gathered_attention if gather else ring_attention

    def forward(self, q_BNTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, ctx: Context) -> Tensor:
        plan: Plan | None = ctx.blocks
        if plan is None:
            return self.whole(q_BNTD, k_BKTD, v_BKTD, ctx)  # type: ignore[no-any-return]
        around = self.around if len(plan.blocks) == self.around.size else self.with_rows
        chunks = 2 if around.size > 1 else 1
        q, k, v = q_BNTD, k_BKTD, v_BKTD
        if self.inside.size > 1:
            q, k, v = to_heads(q, k, v, chunks, self.inside)
        out = self.over_keys(q.unflatten(1, (k.shape[1], -1)), k, v, plan, around).flatten(1, 2)
        return to_positions(out, chunks, self.inside) if self.inside.size > 1 else out
