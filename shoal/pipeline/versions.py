"""Which version of its weights a rank uses in a stream, and how many it has at a time.

A version is the number of updates that the rank had made since the stream began.
"""

from __future__ import annotations

from shoal.pipeline.program import Op, Program


def versions_used(program: Program) -> list[int]:
    """By micro-batch of a whole stream: how many updates its rank had made before the forward pass, whose weights the
    backward pass uses too."""
    used, updates = [], 0
    for act in program.actions:
        updates += act.op is Op.UPDATE
        if act.op is Op.FORWARD:
            used.append(updates)
    return used


def live_versions(program: Program) -> int:
    """The most versions of its weights that a rank has at one moment: the newest one, and those used by micro-batches
    whose gradients are still to come."""
    updates, most = 0, 1
    in_flight: dict[tuple[int, int], int] = {}
    for act in program.actions:
        place = act.stage, act.micro_batch
        if act.op is Op.FORWARD:
            in_flight[place] = updates
        elif act.op in (Op.BACKWARD, Op.WEIGHT_GRADIENT):
            del in_flight[place]
        elif act.op is Op.UPDATE:  # else nothing makes a version
            updates += 1
            most = max(most, len({updates, *in_flight.values()}))
    return most
