"""No tensor parallelism: the interpreter of the role table under which a rank holds the whole of each parameter.

It still names the pieces of fused matrices, since checkpoints and initial weights know the logical ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.model.roles import Role, logical_parts
from shoal.placement import Rule, stacked, whole


def place(role: Role, module: str, parameter: str, shape: Sequence[int]) -> Rule:
    """Where the ``parameter`` (its local name) of ``module`` lies: everywhere, entire."""
    if role.parts:
        placement = stacked(logical_parts(role, module, parameter), shape)
    else:
        placement = whole(f"{module}.{parameter}" if module else parameter, shape)
    return Rule(lambda _: placement)
