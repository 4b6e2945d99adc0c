"""Which version of its weights a rank uses in a stream, and how many it has at a time.

A version is the number of updates that the rank had made since the stream began.
"""

from __future__ import annotations

from shoal.pipeline.program import Op, Program


def versions_used(program: Program) -> list[int]:
    """By micro-batch of a whole stream: how many updates the weights have had that its passes use."""
    used, updates = {}, 0
    for act in program.actions:
        updates += act.op is Op.UPDATE
        if act.op is Op.FORWARD:
            used[act.micro_batch] = updates - (program.ages[act.micro_batch] if program.ages else 0)
    return [used[micro_batch] for micro_batch in sorted(used)]


def live_versions(program: Program) -> int:
    """The most versions of its weights that a rank has at one moment: the newest one, and older ones that are used by
    micro-batches whose gradients are still to come, whether they have arrived or not."""
    used = versions_used(program)
    awaited = {(act.stage, act.micro_batch): used[act.micro_batch] for act in program.actions if act.op is Op.FORWARD}
    updates, most = 0, 1
    for act in program.actions:
        if act.op in (Op.BACKWARD, Op.WEIGHT_GRADIENT):
            del awaited[act.stage, act.micro_batch]
        elif act.op is Op.UPDATE:  # else nothing makes a version
            updates += 1
            most = max(most, len({updates, *(version for version in awaited.values() if version < updates)}))
    return most
